#include "fair_share.h"

#include "parts.h"

namespace swiftkv::parts {

constexpr int64_t kToken = 1 << 16;  // of a flow with weight 1

TEST(tokens_count_over_the_weight) {
    FairShare shares(100);
    shares.know(1, 4);
    EXPECT(shares.is_shared());
    shares.charge_prompt(0, 10);
    shares.charge_prompt(1, 10);
    shares.charge_answer(1, 10);
    EXPECT(shares.counter(0) == 10 * kToken);
    EXPECT(shares.counter(1) == 30 * kToken / 4);
    shares.know(1, 1);
    shares.charge_prompt(1, 1);
    EXPECT(shares.counter(1) == 30 * kToken / 4 + kToken);
}

TEST(who_has_had_the_slack_more_is_past_its_share) {
    FairShare shares(100);
    EXPECT(!shares.is_shared());
    shares.know(1, 1);
    shares.charge_prompt(1, 99);
    EXPECT(!shares.is_past(1, 0));
    shares.charge_prompt(1, 1);
    EXPECT(shares.is_past(1, 0) && !shares.is_past(0, 1));
}

TEST(who_was_idle_has_earned_a_credit) {
    Parts parts(64);
    parts.shares.charge_prompt(0, 1000);
    parts.add(1, tokens(4));
    parts.add(2, tokens(4, 2), 0, 1);
    const int64_t credit = 8 * kLimits.max_num_batched_tokens * kToken;
    EXPECT(parts.shares.counter(1) == 1000 * kToken - credit);
    parts.shares.charge_prompt(0, 1000);
    parts.add(3, tokens(4, 3), 0, 1);  // its flow waits already
    EXPECT(parts.shares.counter(1) == 1000 * kToken - credit);
}

TEST(flows_that_begin_one_after_the_other_begin_alike) {
    Parts parts(64);
    parts.shares.charge_prompt(0, 1000);
    for (int flow = 0; flow < 4; ++flow) parts.add(flow, tokens(4, flow), 0, flow);
    EXPECT(parts.shares.counter(3) == parts.shares.counter(1));
}

TEST(where_nobody_waits_the_last_that_did_counts) {
    Parts parts(64);
    Request& first = parts.add(1, tokens(4));
    parts.shares.charge_prompt(0, 1000);
    parts.roster.start(first);
    parts.add(2, tokens(4, 2), 0, 1);
    EXPECT(parts.shares.counter(1) == (1000 - 8 * kLimits.max_num_batched_tokens) * kToken);
    Request& of_others = parts.add(3, tokens(4, 3), 5, 2);  // no other request of this priority waits
    EXPECT(parts.shares.counter(2) == (1000 - 8 * kLimits.max_num_batched_tokens) * kToken);
    parts.roster.start(of_others);
    parts.roster.check(kLimits.max_num_seqs);
}

// Returns the waiting requests in the order in which a step would look at them.
std::vector<RequestId> in_order(Parts& parts) {
    std::vector<RequestId> ids;
    WaitingQueue::Cursor waiting = parts.roster.waiting().in_order({1.0});
    while (const Request* r = waiting.next()) ids.push_back(r->id);
    return ids;
}

TEST(within_the_slack_the_policy_orders) {
    SchedulerLimits limits = kLimits;
    limits.policy = SchedulingPolicy::kSpf;
    Parts parts(64, limits);
    parts.add(1, tokens(8), 0, 0);
    parts.add(2, tokens(30, 2), 0, 1);
    parts.add(3, tokens(4, 3), 0, 1);
    EXPECT(in_order(parts) == std::vector<RequestId>{3, 1, 2});
    parts.shares.charge_prompt(1, 15);
    EXPECT(in_order(parts) == std::vector<RequestId>{3, 1, 2});
    parts.shares.charge_prompt(1, 1);
    EXPECT(in_order(parts) == std::vector<RequestId>{1, 3, 2});
}

TEST(flows_that_are_equal_go_by_arrival_where_the_policy_says_so) {
    Parts parts(64);
    parts.add(1, tokens(30), 0, 1);
    parts.add(2, tokens(8, 2), 0, 0);
    parts.add(3, tokens(4, 3), 0, 1);
    EXPECT(in_order(parts) == std::vector<RequestId>{1, 2, 3});
}

TEST(priority_comes_before_shares) {
    Parts parts(64);
    parts.add(1, tokens(8), 0, 0);
    parts.add(2, tokens(8, 2), -1, 1);
    parts.shares.charge_prompt(1, 1000);
    EXPECT(in_order(parts) == std::vector<RequestId>{2, 1});
}

TEST(nobody_who_is_past_its_share_passes_one_that_waits_for_room) {
    for (const bool is_past : {false, true}) {
        Parts parts(8);
        parts.roster.start(parts.add(1, tokens(4), 0, 2));
        Request& runs = *parts.roster.find(1);
        EXPECT(parts.cache.extend(runs.table, 4, 4, {}));
        Request& large = parts.add(2, tokens(32, 2), 0, 0);  // there is no room for it
        parts.add(3, tokens(4, 3), 0, 1);
        if (is_past) parts.shares.charge_prompt(1, 1000);
        large.refused_since_s = 0;
        StepBuilder step = parts.begin_step(1.5);  // by now the large request lets others by
        step.admit_waiting();
        EXPECT(rows_of(step) == (is_past ? Rows{} : Rows{{3, 4}}));
    }
}

}  // namespace swiftkv::parts
