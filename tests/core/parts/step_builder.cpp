#include "parts.h"

namespace swiftkv::parts {

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
    parts.add(2, tokens(16, 2));  // four blocks, and the one that the first request grows into
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

TEST(a_draft_takes_what_others_leave) {
    Parts parts(5);
    Request& r = parts.add(1, tokens(8));
    prefill(parts);
    r.draft = tokens(6, 9);
    StepBuilder step = parts.begin_step();
    step.schedule_decodes();
    EXPECT(rows_of(step) == Rows{{1, 7}});
    EXPECT(step.rows()[0].num_samples() == 7);
    Parts crowded(4);
    Request& other = crowded.add(1, tokens(8));
    prefill(crowded);
    other.draft = tokens(6, 9);  // two blocks, and none would be left
    StepBuilder without = crowded.begin_step();
    without.schedule_decodes();
    EXPECT(rows_of(without) == Rows{{1, 1}});
    EXPECT(without.rows()[0].draft.empty());
    Parts partly(4);
    Request& third = partly.add(1, tokens(6));
    prefill(partly);
    third.draft = tokens(12, 9);  // its second block has room for one
    StepBuilder one = partly.begin_step();
    one.schedule_decodes();
    EXPECT(rows_of(one) == Rows{{1, 2}});
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
