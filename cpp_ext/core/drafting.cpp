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

Match find_match(std::span<const TokenId> tokens, const PromptLookup& lookup) {
    Match best;
    for (size_t end = tokens.size(); end-- > 1 && best.length < lookup.longest;) {
        if (tokens[end - 1] != tokens.back()) continue;
        const int length = num_equal(tokens, tokens.size(), end, lookup.longest);
        if (length >= lookup.shortest && length > best.length) best = {end, length};
    }
    return best;
}

std::vector<TokenId> copy_behind(const Match& match, std::span<const TokenId> tokens, int count) {
    std::vector<TokenId> copied;
    for (size_t at = match.end; at < match.end + count; ++at)
        copied.push_back(at < tokens.size() ? tokens[at] : copied[at - tokens.size()]);
    return copied;
}

void GuessRate::note(int num_right, int num_guesses) {
    for (int i = 0; i < std::min(num_right + 1, num_guesses); ++i) rate_ += (double(i < num_right) - rate_) * kPerGuess;
}

void GuessRate::rest() {
    rate_ += (kFirst - rate_) * kPerRest;
}

}  // namespace swiftkv
