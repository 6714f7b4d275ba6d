#include "parts.h"

namespace swiftkv::parts {

constexpr SchedulerLimits kManySeqs = [] {
    SchedulerLimits limits = kLimits;
    limits.max_num_seqs = 16;
    return limits;
}();

// Runs steps until all requests decode.
void prefill(Parts& parts) {
    for (int i = 0; i < 20; ++i) {
        StepBuilder step = parts.begin_step();
        step.schedule_prefills();
        step.admit_waiting();
        if (step.is_empty()) {
            parts.cache.cancel_step();
            return;
        }
        parts.end_step(step);
    }
}

TEST(decodes_take_their_tokens_before_prompts_share_the_rest) {
    Parts parts(32);
    parts.add(1, tokens(5));
    prefill(parts);
    parts.add(2, tokens(30, 2));
    parts.add(3, tokens(30, 3));
    StepBuilder step = parts.begin_step();
    step.schedule_decodes();
    step.schedule_prefills();
    step.admit_waiting();
    EXPECT(rows_of(step) == Rows{{1, 1}, {2, 15}});
    EXPECT(step.admitted().size() == 1);
    parts.end_step(step);
    StepBuilder next = parts.begin_step();
    next.schedule_decodes();
    next.schedule_prefills();
    next.admit_waiting();
    EXPECT(rows_of(next) == Rows{{1, 1}, {2, 15}});
    EXPECT(next.rows()[1].samples);
}

TEST(a_request_is_admitted_if_a_block_is_left_for_each_that_runs) {
    Parts parts(6);
    parts.add(1, tokens(8));
    prefill(parts);
    parts.add(2, tokens(16, 2));  // needs four blocks, beside the one that the first request grows into
    StepBuilder step = parts.begin_step();
    step.admit_waiting();
    EXPECT(step.is_empty());
    EXPECT(step.num_matches() == 1);
    step.admit_waiting();
    EXPECT(step.num_matches() == 1);  // nothing has changed
    parts.roster.erase(*parts.roster.find(1));
    step.admit_waiting();
    EXPECT(rows_of(step) == Rows{{2, 16}});
}

TEST(the_last_that_runs_makes_room_for_others) {
    Parts parts(4);
    parts.add(1, tokens(8));
    parts.add(2, tokens(4, 2));
    prefill(parts);
    EXPECT(parts.cache.stats()[0].free == 1);
    StepBuilder step = parts.begin_step();
    step.schedule_decodes();
    EXPECT(rows_of(step) == Rows{{1, 1}});
    EXPECT(parts.roster.take_preempted() == std::vector<RequestId>{2});
    EXPECT(!step.must_commit());
}

// Fills all slots with requests of the lowest class, which all decode.
void fill_with_batch_work(Parts& parts) {
    for (int i = 1; i <= parts.limits.max_num_seqs; ++i) parts.add(i, tokens(4, i), 2 * kPrioritiesPerClass);
    prefill(parts);
}

TEST(a_higher_class_takes_the_place_of_a_lower_one_in_the_step) {
    Parts parts(32);
    fill_with_batch_work(parts);
    parts.add(9, tokens(4, 9));
    StepBuilder step = parts.begin_step();
    step.schedule_decodes();
    EXPECT(step.may_seat());
    step.admit_waiting();
    EXPECT(rows_of(step) == Rows{{1, 1}, {2, 1}, {3, 1}, {9, 4}});
    EXPECT(step.num_displaced() == 1 && !step.must_commit());
    EXPECT(parts.roster.take_preempted() == std::vector<RequestId>{4});
    EXPECT(parts.roster.num_displaced_total() == CountByClass{0, 0, 0, 1});
    step.admit_waiting();
    EXPECT(rows_of(step).size() == 4);  // the displaced request is not admitted again
}

TEST(nobody_is_displaced_whom_a_step_in_progress_has) {
    Parts parts(32);
    fill_with_batch_work(parts);
    parts.add(9, tokens(4, 9));
    parts.roster.find(4)->num_scheduled = 1;
    StepBuilder step = parts.begin_step();
    step.admit_waiting();
    EXPECT(step.is_empty() && step.must_commit());
    EXPECT(parts.roster.take_preempted().empty());
}

TEST(nobody_is_preempted_whom_a_step_in_progress_has) {
    Parts parts(4);
    parts.add(1, tokens(8));
    parts.add(2, tokens(4, 2));
    prefill(parts);
    parts.cache.begin_loading(parts.roster.find(2)->root_key);  // takes the last free block
    StepBuilder step = parts.begin_step();
    parts.roster.find(2)->num_scheduled = 1;
    step.schedule_decodes();
    EXPECT(step.is_empty() && step.must_commit());
    EXPECT(parts.roster.take_preempted().empty());
}

// Returns the rows of a step in which a decoding request has a draft of `length` tokens.
Rows drafted(Parts& parts, Request& r, int length) {
    prefill(parts);
    r.draft = tokens(length, 9);
    StepBuilder step = parts.begin_step();
    step.schedule_decodes();
    step.schedule_prefills();
    step.admit_waiting();
    step.add_drafts();
    EXPECT(step.rows()[0].num_samples() == step.rows()[0].num_tokens);
    return rows_of(step);
}

TEST(a_draft_takes_what_others_leave) {
    Parts parts(5, kManySeqs);
    EXPECT(drafted(parts, parts.add(1, tokens(8)), 6) == Rows{{1, 7}});
    Parts crowded(4, kManySeqs);  // after the request's own next block, none would be left
    EXPECT(drafted(crowded, crowded.add(1, tokens(8)), 6) == Rows{{1, 4}});
    Parts partly(4, kManySeqs);  // the second block has room for one
    EXPECT(drafted(partly, partly.add(1, tokens(6)), 12) == Rows{{1, 2}});
    Parts short_step(16, kManySeqs);
    short_step.limits.max_num_batched_tokens = 5;
    EXPECT(drafted(short_step, short_step.add(1, tokens(4)), 12) == Rows{{1, 5}});
    Parts few(16);
    EXPECT(drafted(few, few.add(1, tokens(4)), 12) == Rows{{1, 4}});  // no more samples than max_num_seqs
}

TEST(an_oversized_prompt_goes_alone) {
    SchedulerLimits limits = kLimits;
    limits.enable_chunked_prefill = false;
    Parts parts(32, limits);
    parts.add(1, tokens(20));
    parts.add(2, tokens(4, 2));
    StepBuilder step = parts.begin_step();
    step.admit_oversized_prompt();
    step.admit_waiting();
    EXPECT(rows_of(step) == Rows{{1, 20}});
}

}  // namespace swiftkv::parts
