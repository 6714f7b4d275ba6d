// Drafts by prompt lookup: what followed the last tokens of a request where these occurred before comes next, perhaps.
// Long quotations, code that is edited, and loops are guessed well.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "types.h"

namespace swiftkv {

struct PromptLookup {
    int num_speculative_tokens;  // the most guesses of one draft
    int shortest, longest;       // the number of last tokens that must occur before, and beyond which no more count
};

// A place where the last `length` tokens occurred before; none if that is 0.
struct Match {
    size_t end = 0;  // the number of tokens up to there
    int length = 0;
};

// Returns the place where most of the last tokens, up to `lookup.longest` of them, occurred before; of several, the
// latest.
Match find_match(std::span<const TokenId> tokens, const PromptLookup& lookup);
// Returns the next `count` tokens if what followed the match comes again. A copy that comes to the end goes on with its
// own tokens, as in LZ77.
std::vector<TokenId> copy_behind(const Match& match, std::span<const TokenId> tokens, int count);

// How often the guesses of one request have been right lately.
class GuessRate {
  public:
    // Notes that of `num_guesses` in a row the first `num_right` were right. Those after the first wrong one say
    // nothing.
    void note(int num_right, int num_guesses);
    // Notes that nothing was guessed behind a match. In time, a request whose guesses were wrong is tried again.
    void rest();
    // How often the next guess is expected to be right, and each one after it if all before it were.
    double value() const { return rate_; }

  private:
    static constexpr double kFirst = 0.875;  // high, so that guesses are tried even where they are expensive

    double rate_ = kFirst;
};

}  // namespace swiftkv
