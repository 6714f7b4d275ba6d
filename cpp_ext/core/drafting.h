// Drafts by prompt lookup: what followed the last tokens of a request where these occurred before comes next, perhaps.
// Long quotations, code that is edited, and loops are guessed well.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "types.h"

namespace swiftkv {

struct PromptLookup {
    static constexpr int kMaxLongest = 16;

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

// How often the guesses of one request have been right lately, by the length of the match that they follow.
class GuessRates {
  public:
    GuessRates();
    // Notes that of `num_guesses` in a row the first `num_right` were right. Those after the first wrong one say
    // nothing.
    void note(const Match& match, int num_right, int num_guesses);
    // Notes that nothing was guessed behind a match. In time, what was guessed wrong is tried again.
    void rest(const Match& match);
    // Returns the number of guesses, at most `most`, each of which is expected to be right, as are those before it,
    // more often than in `price` of all cases.
    int num_worth(const Match& match, double price, int most) const;

  private:
    std::array<double, PromptLookup::kMaxLongest + 1> rates_;  // by length
};

}  // namespace swiftkv
