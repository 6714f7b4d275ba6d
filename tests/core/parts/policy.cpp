#include <limits>

#include "parts.h"

namespace swiftkv::parts {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

TEST(lower_priorities_and_then_earlier_arrivals_go_first) {
    Parts parts(16);
    Request& late = parts.add(1, tokens(4), 5);
    Request& first = parts.add(2, tokens(4), 1);
    Request& second = parts.add(3, tokens(4), 1);
    EXPECT(parts.roster.waiting().all() == std::vector<Request*>{&first, &second, &late});
}

TEST(the_last_in_order_makes_room) {
    Parts parts(16);
    std::vector<Request*> running{&parts.add(1, tokens(4), 5), &parts.add(2, tokens(4), 9)};
    EXPECT(&parts.policy.victim(running) == running.back());
}

TEST(a_prompt_is_split_where_that_is_allowed) {
    Parts split(16);
    EXPECT(!split.policy.is_oversized(split.add(1, tokens(30))));
    EXPECT(split.policy.first_chunk(*split.roster.find(1), 10, {}, kNoLimit) == 10);
    EXPECT(split.policy.first_chunk(*split.roster.find(1), 40, {}, kNoLimit) == 30);
    SchedulerLimits limits = kLimits;
    limits.enable_chunked_prefill = false;
    Parts whole(16, limits);
    EXPECT(whole.policy.is_oversized(whole.add(1, tokens(30))));
    EXPECT(!whole.policy.is_oversized(whole.add(2, tokens(16, 2))));
    EXPECT(whole.policy.first_chunk(*whole.roster.find(1), 10, {}, kNoLimit) == 30);
}

TEST(a_draft_follows_what_is_known_and_leaves_room_for_what_is_sampled_behind_it) {
    Parts parts(16);
    Request& r = parts.add(1, tokens(4));
    r.draft = tokens(6);
    EXPECT(parts.policy.draft_length(r, 16) == 0);  // the step does not have the request's last token
    r.num_scheduled = 4;
    EXPECT(parts.policy.draft_length(r, 16) == 6);
    EXPECT(parts.policy.draft_length(r, 5) == 5);
    EXPECT(parts.policy.draft_length(r, -1) == 0);
    r.last_len = r.num_known() + 3;
    EXPECT(parts.policy.draft_length(r, 16) == 2);
    r.num_scheduled = 5;  // a token that is not known
    EXPECT(parts.policy.draft_length(r, 16) == 0);
}

TEST(guesses_are_computed_while_they_yield_more_tokens_a_second) {
    Parts parts(16);
    Request& r = parts.add(1, tokens(4));
    r.num_computed = 4;
    r.append(7, parts.limits);
    const std::vector<Request*> running{&r};
    const std::vector<double> chances{0.9, 0.81, 0.5, 0.3};
    EXPECT(parts.policy.num_worthy_guesses(running, chances) == 4);  // no step was measured yet
    // One row takes 4, and each further one 1, 4 and 0: one token in 4, 1.9 in 5, 2.71 in 6, 3.21 in 7, 3.51 in 8.
    const auto num_worthy = [&](double row_s, double step_s) {
        parts.step_time = StepTime::remembered({row_s, 0, 0, 0, 0, step_s});
        return parts.policy.num_worthy_guesses(running, chances);
    };
    EXPECT(num_worthy(1, 3) == 3);
    EXPECT(num_worthy(4, 1e-9) == 0);
    EXPECT(num_worthy(1e-9, 4) == 4);
}

TEST(guesses_beyond_an_expensive_one_are_computed_if_all_together_pay) {
    Parts parts(16);
    Request& r = parts.add(1, tokens(4));
    r.num_computed = 4;
    r.append(7, parts.limits);
    parts.step_time = StepTime::remembered({1, 0, 0, 0, 0, 1});
    // The second row takes as long as the first; all after it take nothing.
    for (int i = 0; i < 200; ++i) {
        for (int num_rows = 1; num_rows <= 8; num_rows *= 2) {
            StepWork work;
            work.add_row(4, num_rows, num_rows - 1);
            parts.step_time.observe(work, num_rows == 1 ? 2 : 4);
        }
    }
    const std::vector<Request*> running{&r};
    EXPECT(parts.policy.num_worthy_guesses(running, std::vector<double>{0.9}) == 0);
    EXPECT(parts.policy.num_worthy_guesses(running, std::vector<double>{0.9, 0.9, 0.9}) == 3);
}

TEST(a_prefix_comes_while_a_running_request_computes_its_next_block) {
    Parts parts(16);
    Request& running = parts.add(1, tokens(12));
    parts.roster.start(running);
    Request& same = parts.add(2, tokens(20));
    Request& other = parts.add(3, tokens(20, 3));
    EXPECT(parts.policy.is_prefix_coming(same, parts.roster.running()));
    EXPECT(!parts.policy.is_prefix_coming(other, parts.roster.running()));
    running.num_computed = 12;  // everything that both requests share
    EXPECT(!parts.policy.is_prefix_coming(same, parts.roster.running()));
    running.num_computed = 0;
    same.skip_prefix_match = true;
    EXPECT(!parts.policy.is_prefix_coming(same, parts.roster.running()));
}

TEST(a_prefix_comes_while_its_blocks_are_loading) {
    Parts parts(16);
    Request& r = parts.add(1, tokens(20));
    const std::vector<BlockId> blocks = parts.cache.begin_loading(r.keys[0]);
    EXPECT(parts.policy.is_prefix_coming(r, {}));
    parts.cache.end_loading(blocks, true);
    EXPECT(!parts.policy.is_prefix_coming(r, {}));
}

TEST(who_would_not_fit_alone_cannot_be_held) {
    Parts parts(5);
    EXPECT(parts.policy.could_hold(parts.add(1, tokens(20))));
    EXPECT(!parts.policy.could_hold(parts.add(2, tokens(21, 2))));
}

}  // namespace swiftkv::parts
