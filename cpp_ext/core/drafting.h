// Drafts by prompt lookup: what followed the last tokens of a request where these occurred before comes next, perhaps.
// Long quotations, code that is edited, and loops are guessed well.
#pragma once

#include <span>
#include <vector>

#include "types.h"

namespace swiftkv {

struct PromptLookup {
    int num_speculative_tokens;  // the most guesses of one draft
    int shortest, longest;       // the number of last tokens that must occur before, and beyond which no more count
};

// Returns up to `most` guesses at the tokens that follow. They are copied from where most of the last tokens, up to
// `lookup.longest` of them, occurred before; the latest of such places. A copy that comes to the end goes on with its
// own tokens, as in LZ77. Returns an empty list if not even the last `lookup.shortest` tokens occurred before.
std::vector<TokenId> guess_next(std::span<const TokenId> tokens, const PromptLookup& lookup, int most);

// How often the guesses of one request have been right lately.
class GuessRate {
  public:
    // Notes that of `num_guesses` in a row the first `num_right` were right. Those after the first wrong one say
    // nothing.
    void note(int num_right, int num_guesses);
    // Notes a step without a guess. In time, a request whose guesses were wrong is tried again.
    void rest();
    // Returns the number of guesses, at most `most`, each of which is expected to be right, as are those before it,
    // more often than in `price` of all cases.
    int num_worth(double price, int most) const;

  private:
    static constexpr double kFirst = 0.7;

    double rate_ = kFirst;
};

}  // namespace swiftkv
