// Drafts by prompt lookup. If the last tokens of a request occurred before, the guess is that the same tokens follow
// them again. This works well for long quotations, edited code and loops.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "types.h"

namespace swiftkv {

struct PromptLookup {
    int num_speculative_tokens;  // the most guesses of one draft
    int shortest, longest;       // the fewest last tokens that must have occurred before, and the most that count
};

// A place where the last `length` tokens occurred before. Length 0: there is none.
struct Match {
    size_t end = 0;  // the number of tokens up to there
    int length = 0;
};

// Returns the longest match, of at most `lookup.longest` last tokens; of several, the latest.
Match find_match(std::span<const TokenId> tokens, const PromptLookup& lookup);
// Returns `count` guesses: copies of the tokens behind the match. A copy that reaches the last token goes on with its
// own tokens, as in LZ77.
std::vector<TokenId> copy_behind(const Match& match, std::span<const TokenId> tokens, int count);

// How often the guesses of one request have been right lately.
class GuessRate {
  public:
    // Notes that of `num_guesses` in a row the first `num_right` were right. Guesses after the first wrong one are not
    // counted.
    void note(int num_right, int num_guesses);
    // Notes that there was a match and nothing was guessed. After some time, a request whose guesses were wrong gets
    // guesses again.
    void rest();
    // How often the next guess is expected to be right, and each one after it if all before it were.
    double value() const { return rate_; }

  private:
    static constexpr double kFirst = 0.875;  // high, so that guesses are tried even where they are expensive

    double rate_ = kFirst;
};

}  // namespace swiftkv
