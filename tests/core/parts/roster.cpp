#include "parts.h"

namespace swiftkv::parts {

TEST(who_starts_has_the_lowest_free_slot) {
    Parts parts(16);
    for (RequestId id = 1; id <= 4; ++id) parts.roster.start(parts.add(id, tokens(4)));
    EXPECT(!parts.roster.has_free_slot());
    EXPECT(parts.roster.find(3)->slot == 2);
    parts.roster.erase(*parts.roster.find(4));
    parts.roster.erase(*parts.roster.find(2));
    parts.roster.start(parts.add(5, tokens(4)));
    EXPECT(parts.roster.find(5)->slot == 1);
    EXPECT(parts.roster.find(2) == nullptr);
    parts.roster.check(kLimits.max_num_seqs);
}

TEST(running_requests_stand_in_order) {
    Parts parts(16);
    parts.roster.start(parts.add(1, tokens(4), 3));
    parts.roster.start(parts.add(2, tokens(4), 1));
    parts.roster.start(parts.add(3, tokens(4), 2));
    std::vector<RequestId> ids;
    for (const Request* r : parts.roster.running()) ids.push_back(r->id);
    EXPECT(ids == std::vector<RequestId>{2, 3, 1});
}

TEST(who_is_preempted_waits_in_its_old_place_without_blocks) {
    Parts parts(16);
    Request& r = parts.add(1, tokens(8));
    parts.add(2, tokens(8, 2));
    parts.roster.start(r);
    EXPECT(parts.cache.extend(r.table, 8, 8, {}));
    r.num_computed = 8;
    parts.roster.preempt(r);
    EXPECT(parts.roster.waiting().all().front() == &r);
    EXPECT(r.num_computed == 0 && r.slot == kNone);
    EXPECT(parts.cache.stats()[0].free == 16);
    EXPECT(parts.roster.num_preemptions_total() == 1);
    EXPECT(parts.roster.take_preempted() == std::vector<RequestId>{1});
    EXPECT(parts.roster.take_preempted().empty());
    parts.roster.check(kLimits.max_num_seqs);
}

TEST(blocks_that_a_step_has_are_in_flight_when_their_request_leaves) {
    Parts parts(16);
    StepBuilder step = parts.begin_step();
    Request& r = parts.add(1, tokens(8));
    step.admit_waiting();
    parts.roster.preempt(r);
    EXPECT(parts.cache.stats()[0].in_flight == 2);
    parts.cache.settle();
    EXPECT(parts.cache.stats()[0].free == 16);
}

TEST(who_ends_is_not_named_as_preempted) {
    Parts parts(16);
    Request& r = parts.add(1, tokens(4));
    parts.roster.start(r);
    parts.roster.preempt(r);
    parts.roster.erase(r);
    EXPECT(parts.roster.take_preempted().empty());
    EXPECT(parts.roster.is_empty());
}

TEST(what_waiting_requests_want_is_counted) {
    Parts parts(16);
    Request& r = parts.add(1, tokens(8));
    parts.add(2, tokens(5, 2));
    EXPECT(parts.demand.take(0)[0].total_now == 3 + 3);  // the blocks of each request, and one to grow into
    parts.roster.start(r);
    EXPECT(parts.demand.take(1)[0].total_now == 3 + 1);
    EXPECT(parts.demand.take(1)[0].longest == 0);  // the call above has started it anew
    parts.demand.check(parts.roster.waiting().all());
}

}  // namespace swiftkv::parts
