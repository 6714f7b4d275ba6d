#include "drafting.h"

#include <algorithm>
#include <cmath>

namespace swiftkv {

namespace {

constexpr double kPerGuess = 1.0 / 16;  // a guess counts for e^-1 after 16 others
constexpr double kPerRest = 1.0 / 128;

// The rate before anything is known: high, so that long matches are tried even where guesses are expensive.
double first_rate(int length) {
    return 1 - std::pow(0.5, length);
}

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

GuessRates::GuessRates() {
    for (size_t length = 0; length < rates_.size(); ++length) rates_[length] = first_rate(static_cast<int>(length));
}

void GuessRates::note(const Match& match, int num_right, int num_guesses) {
    double& rate = rates_[match.length];
    for (int i = 0; i < std::min(num_right + 1, num_guesses); ++i) rate += (double(i < num_right) - rate) * kPerGuess;
}

void GuessRates::rest(const Match& match) {
    double& rate = rates_[match.length];
    rate += (first_rate(match.length) - rate) * kPerRest;
}

int GuessRates::num_worth(const Match& match, double price, int most) const {
    const double rate = rates_[match.length];
    int count = 0;
    for (double all_right = rate; count < most && all_right > price; all_right *= rate) ++count;
    return count;
}

}  // namespace swiftkv
