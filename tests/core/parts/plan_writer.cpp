#include "parts.h"

namespace swiftkv::parts {

using Ints = std::vector<int32_t>;

TEST(a_plan_has_a_row_for_each_token_and_a_table_for_each_sequence) {
    Parts parts(16);
    parts.add(1, tokens(6));
    parts.add(2, tokens(4, 2));
    StepBuilder step = parts.begin_step();
    step.admit_waiting();
    const auto plan = parts.writer.write(step.rows(), step.admitted(), {9});
    EXPECT(plan->token_ids == Ints{0, 1, 2, 3, 4, 5, 2000, 2001, 2002, 2003});
    EXPECT(plan->positions == Ints{0, 1, 2, 3, 4, 5, 0, 1, 2, 3});
    EXPECT(plan->query_starts == Ints{0, 6, 10});
    EXPECT(plan->context_lens == Ints{6, 4});
    EXPECT(plan->row_slots == Ints{0, 1});
    EXPECT(plan->stream_tables[0][0] == Ints{0, 2, 4});  // blocks of two layers
    EXPECT(plan->table_starts[0] == Ints{0, 2, 3});
    EXPECT(plan->logits_rows == Ints{5, 9});
    EXPECT(plan->logits_seqs == Ints{0, 1});
    EXPECT(plan->num_prompt_tokens == 10);
    EXPECT(plan->new_request_ids == std::vector<RequestId>{1, 2});
    EXPECT(plan->preempted_request_ids == std::vector<RequestId>{9});
    EXPECT(!plan->has_unknown_tokens);
    EXPECT(plan->num_stream_buffers == 0);
}

TEST(a_token_that_is_not_known_is_named_by_its_slot) {
    Parts parts(16);
    parts.add(1, tokens(6));
    StepBuilder step = parts.begin_step();
    step.admit_waiting();
    step.rows()[0].request->is_in_step = false;
    StepBuilder ahead = parts.begin_step();
    ahead.schedule_decodes();
    const auto plan = parts.writer.write(ahead.rows(), {}, {});
    EXPECT(plan->token_ids == Ints{unknown_token(0)});
    EXPECT(plan->positions == Ints{6});
    EXPECT(plan->has_unknown_tokens);
    EXPECT(plan->num_prompt_tokens == 0);
}

TEST(logits_are_asked_behind_a_token_and_behind_each_of_its_draft) {
    Parts parts(16);
    Request& r = parts.add(1, tokens(6));
    parts.add(2, tokens(3, 2));
    StepBuilder step = parts.begin_step();
    step.admit_waiting();
    parts.end_step(step, 7);
    r.draft = {50, 51};
    StepBuilder next = parts.begin_step();
    next.schedule_decodes();
    next.add_drafts();
    const auto plan = parts.writer.write(next.rows(), {}, {});
    EXPECT(plan->token_ids == Ints{7, 50, 51, 7});
    EXPECT(plan->positions == Ints{6, 7, 8, 3});
    EXPECT(plan->logits_rows == Ints{0, 1, 2, 3});
    EXPECT(plan->logits_seqs == Ints{0, 0, 0, 1});
    EXPECT(plan->context_lens == Ints{9, 4});
}

TEST(borrowed_blocks_are_staged_side_by_side) {
    // Two extents of two blocks; a block has two layers of 100 bytes.
    const Link link{
        .group = 0, .num_extents = 2, .blocks_per_extent = 2, .extent_bytes = 400, .base_offset_bytes = 5000};
    Parts parts(2, kLimits, {link});
    parts.cache.borrow(0, std::vector<int32_t>{1});
    parts.cache.begin_step();
    parts.cache.grow_staging();
    parts.cache.settle();
    EXPECT(parts.cache.num_staging_layer_blocks(0) == 2);
    Request& r = parts.add(1, tokens(8));
    StepBuilder step = parts.begin_step();
    parts.roster.start(r);
    EXPECT(parts.cache.extend(r.table, 8, 8, {}));
    r.num_scheduled = 8;
    r.num_unknown = 1;
    std::vector<StepRow> rows{{&r, r.id, 8, true}};
    const auto plan = parts.writer.write(rows, {}, {});
    EXPECT(plan->num_stream_buffers == 2);
    const BlockId local = 0, staging = 1;
    const int64_t in_extent_1 = 5000 + 400;
    // Each buffer has a layer block of its own.
    EXPECT(plan->stream_tables[0][0] == Ints{local * 2, staged(staging * 2)});
    EXPECT(plan->stream_tables[1][0] == Ints{local * 2, staged(staging * 2 + 1)});
    EXPECT(plan->copies[0].loads[0].rows.empty());  // the step writes the whole block
    EXPECT(plan->copies[0].stores[0].rows == std::vector<int64_t>{0, in_extent_1, staging * 200, 1, 1});
    EXPECT(plan->copies[0].stores[1].rows == std::vector<int64_t>{0, in_extent_1, staging * 200 + 100, 1, 1});
    r.num_computed = 8;
    r.num_scheduled = 0;
    parts.cache.settle();
}

TEST(neighbours_are_copied_in_one_run) {
    CopyRuns runs;
    for (int i = 0; i < 3; ++i) runs.add(0, 1000 + 200 * i, 100 * i, true, 200, 100);
    runs.add(0, 1000 + 200 * 3, 900, true, 200, 100);
    runs.add(1, 1000 + 200 * 4, 1000, true, 200, 100);
    EXPECT(runs.rows == std::vector<int64_t>{0, 1000, 0, 3, 1, 0, 1600, 900, 1, 1, 1, 1800, 1000, 1, 1});
}

}  // namespace swiftkv::parts
