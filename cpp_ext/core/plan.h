// What the scheduler hands to a step and gets back from it, as flat arrays ready to become tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "types.h"

namespace swiftkv {

// T tokens of S sequences; R of the tokens need a successor.
struct StepPlan {
    std::vector<TokenId> token_ids;                  // [T]
    std::vector<int32_t> positions;                  // [T]
    std::vector<int32_t> query_starts;               // [S+1] rows of T that belong to each sequence
    std::vector<int32_t> context_lens;               // [S] tokens with KV after this step
    std::vector<RequestId> request_ids;              // [S]
    std::vector<int32_t> row_slots;                  // [S]
    std::vector<std::vector<int32_t>> block_tables;  // per group [sum of blocks]
    std::vector<std::vector<int32_t>> table_starts;  // per group [S+1]
    std::vector<int32_t> logits_rows;                // [R] into T
    std::vector<int32_t> logits_seqs;                // [R] into S
    int num_prompt_tokens = 0;
    std::vector<RequestId> new_request_ids;        // [A] admitted for the first time
    std::vector<int32_t> new_cached_tokens;        // [A] of them, prompt tokens found in the cache
    std::vector<RequestId> preempted_request_ids;  // [P]
};

enum class FinishReason : uint8_t { kRunning = 0, kStop = 1, kLength = 2, kAborted = 3 };

// One row per row of the plan's logits_rows.
struct StepResult {
    std::vector<RequestId> request_ids;
    std::vector<TokenId> token_ids;
    std::vector<uint8_t> finish_reasons;  // FinishReason
};

struct SchedulerStats {
    int num_running, num_waiting;
    int64_t num_preemptions_total, prefix_query_tokens_total, prefix_hit_tokens_total;
    std::vector<GroupStats> groups;
};

}  // namespace swiftkv
