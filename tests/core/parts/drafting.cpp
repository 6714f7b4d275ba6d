#include "drafting.h"

#include "parts.h"

namespace swiftkv::parts {

namespace {

constexpr PromptLookup kLookup{.num_speculative_tokens = 8, .shortest = 2, .longest = 3};

std::vector<TokenId> guesses(const std::vector<TokenId>& tokens, int count) {
    const Match match = find_match(tokens, kLookup);
    return match.length == 0 ? std::vector<TokenId>() : copy_behind(match, tokens, count);
}

}  // namespace

TEST(what_followed_the_last_tokens_is_guessed) {
    EXPECT((guesses({5, 1, 2, 3, 4, 9, 1, 2}, 2) == std::vector<TokenId>{3, 4}));
    EXPECT(guesses({5, 1, 2, 3, 4, 9, 8, 2}, 2).empty());  // one token is not enough
    EXPECT(guesses({5}, 2).empty());
    EXPECT(guesses({}, 2).empty());
}

TEST(the_longest_match_goes_before_the_latest) {
    EXPECT((guesses({7, 1, 2, 3, 1, 2, 4, 0, 7, 1, 2}, 1) == std::vector<TokenId>{3}));
    EXPECT((guesses({0, 1, 2, 3, 1, 2, 4, 0, 7, 1, 2}, 1) == std::vector<TokenId>{4}));
    // Beyond three equal tokens no more count, so the later one is taken.
    EXPECT((guesses({6, 7, 1, 2, 3, 5, 7, 1, 2, 4, 6, 7, 1, 2}, 1) == std::vector<TokenId>{4}));
}

TEST(a_loop_is_guessed_at_full_length) {
    EXPECT((guesses({1, 2, 3, 1, 2, 3, 1, 2}, 5) == std::vector<TokenId>{3, 1, 2, 3, 1}));
    EXPECT((guesses({4, 4, 4}, 4) == std::vector<TokenId>{4, 4, 4, 4}));
}

TEST(the_rate_follows_what_was_right) {
    GuessRate right, wrong;
    for (int i = 0; i < 100; ++i) right.note(3, 3);
    EXPECT(right.value() > 0.99);
    for (int i = 0; i < 100; ++i) wrong.note(0, 8);
    EXPECT(wrong.value() < 0.05);
    // The guesses after the first wrong one do not count.
    GuessRate once, often;
    once.note(1, 2);
    often.note(1, 8);
    EXPECT(once.value() == often.value());
    // In time it is tried again.
    for (int i = 0; i < 1000; ++i) wrong.rest();
    EXPECT(wrong.value() > 0.87);
}

}  // namespace swiftkv::parts
