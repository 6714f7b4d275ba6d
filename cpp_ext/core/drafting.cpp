#include "drafting.h"

#include <algorithm>

namespace swiftkv {

namespace {

constexpr double kPerGuess = 1.0 / 16;  // a guess counts for e^-1 after 16 others
constexpr double kPerRest = 1.0 / 128;

// Returns how many of the tokens before `a` equal those before `b`, which is smaller; at most `most`.
int num_equal(std::span<const TokenId> tokens, size_t a, size_t b, int most) {
    int count = 0;
    const int end = static_cast<int>(std::min<size_t>(b, most));
    while (count < end && tokens[a - 1 - count] == tokens[b - 1 - count]) ++count;
    return count;
}

}  // namespace

std::vector<TokenId> guess_next(std::span<const TokenId> tokens, const PromptLookup& lookup, int most) {
    int best = lookup.shortest - 1;
    size_t from = 0;
    for (size_t at = tokens.size(); at-- > 1 && best < lookup.longest;) {
        if (tokens[at - 1] != tokens.back()) continue;
        const int count = num_equal(tokens, tokens.size(), at, lookup.longest);
        if (count <= best) continue;
        best = count;
        from = at;
    }
    std::vector<TokenId> draft;
    if (from == 0) return draft;
    for (int i = 0; i < most; ++i) {
        const size_t at = from + i;
        draft.push_back(at < tokens.size() ? tokens[at] : draft[at - tokens.size()]);
    }
    return draft;
}

void GuessRate::note(int num_right, int num_guesses) {
    for (int i = 0; i < std::min(num_right + 1, num_guesses); ++i) rate_ += (double(i < num_right) - rate_) * kPerGuess;
}

void GuessRate::rest() {
    rate_ += (kFirst - rate_) * kPerRest;
}

int GuessRate::num_worth(double price, int most) const {
    int count = 0;
    for (double all_right = rate_; count < most && all_right > price; all_right *= rate_) ++count;
    return count;
}

}  // namespace swiftkv
