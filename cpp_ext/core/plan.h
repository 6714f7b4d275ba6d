// What the scheduler hands to a step and gets back from it, as flat arrays ready to become tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "step_time.h"
#include "types.h"

namespace swiftkv {

// Copies of layer blocks between the pool and those of lenders, as runs: row i of `rows` is
//   link, peer_offset_bytes, local_offset_bytes, count, staged
// and copies `count` layer blocks of layer 0. The peer's lie one block apart, and layer l at l layer blocks further. So
// do local ones, unless they are staged: then they lie side by side, at the same address for every layer.
struct CopyRuns {
    std::vector<int64_t> rows;  // [R, 5]

    void add(int link, int64_t peer_offset, int64_t local_offset, bool staged, int64_t block_bytes,
             int64_t layer_block_bytes);
    int64_t num_blocks() const;
};

// The copies of one KV group in one step.
struct GroupCopies {
    CopyRuns spills;               // to peers, before anything of the layer is written here
    std::vector<CopyRuns> loads;   // per stream buffer, before the layer's KV is written or read
    std::vector<CopyRuns> stores;  // per stream buffer, to peers, once the layer's KV is written
};

// A request has computed the front of its prompt, and skips the rest, blocks `first` to `end`, which storage has loaded
// meanwhile.
struct Meeting {
    RequestId id;
    int first, end;
};

// T tokens of S sequences; R of the tokens need a successor: the last known one of a sequence and each of its draft, or
// none where a prompt is not at its end. A plan may have no token and only copies.
struct StepPlan {
    std::vector<TokenId> token_ids;      // [T] or unknown_token(row slot)
    std::vector<int32_t> positions;      // [T]
    std::vector<int32_t> query_starts;   // [S+1] rows of T that belong to each sequence
    std::vector<int32_t> context_lens;   // [S] tokens with KV after this step
    std::vector<RequestId> request_ids;  // [S]
    std::vector<int32_t> row_slots;      // [S]
    // Per stream buffer (one where nothing is streamed) and group [sum of blocks]: what layers l with
    // l % num_stream_buffers == buffer read.
    std::vector<std::vector<std::vector<int32_t>>> block_tables;
    std::vector<std::vector<int32_t>> table_starts;  // per group [S+1]
    std::vector<int32_t> logits_rows;                // [R] into T, rising
    std::vector<int32_t> logits_seqs;                // [R] into S
    bool has_unknown_tokens = false;
    int num_prompt_tokens = 0;
    StepWork work;
    std::vector<RequestId> new_request_ids;        // [A] admitted for the first time
    std::vector<int32_t> new_cached_tokens;        // [A] their prompt tokens that were found in the cache
    std::vector<int32_t> new_borrowed_starts;      // [A+1] rows of the next that belong to each
    std::vector<int32_t> new_borrowed_blocks;      // numbers of a prompt's blocks that were found in borrowed memory
    std::vector<double> new_arrivals_s;            // [A] when they arrived
    std::vector<RequestId> met_request_ids;        // [M] the requests of meetings
    std::vector<int32_t> met_blocks;               // [M, 2] their first and end
    std::vector<RequestId> preempted_request_ids;  // [P]
    int num_stream_buffers = 0;                    // 0: nothing is streamed in this step
    std::vector<GroupCopies> copies;               // per group
    std::vector<int32_t> local_moves;              // [M, 3] group, block, its new place: before anything else, in order
};

// kDropped: the request goes on, but what it needed was lost during the step: it is computed again.
// kBroken: there is no token for it, and what the step computed is not kept.
// kRejected: it was sampled behind a wrong guess, or behind the token that ended its request.
enum class FinishReason : uint8_t {
    kRunning = 0,
    kStop = 1,
    kLength = 2,
    kAborted = 3,
    kDropped = 4,
    kBroken = 5,
    kRejected = 6
};

// R rows, one per row of the plan's logits_rows, and S sequences, those of the plan.
struct StepResult {
    std::vector<RequestId> request_ids;   // [R]
    std::vector<TokenId> token_ids;       // [R]
    std::vector<uint8_t> finish_reasons;  // [R] FinishReason
    std::vector<uint8_t> counts;          // [S] 1, or 0 where nothing that the step computed for the sequence is kept
};

struct SchedulerStats {
    int num_running, num_waiting;
    int64_t num_preemptions_total;
    CountByClass num_displaced_total;  // the preemptions for the sake of a higher class
    int64_t prefix_matches_total;      // how often a prompt was looked up in the prefix cache
    int64_t prefix_query_tokens_total, prefix_hit_tokens_total;
    int64_t borrowed_hit_tokens_total;   // the hits that lay in borrowed blocks
    int64_t window_missed_tokens_total;  // tokens behind the hits that were known, without the tail of their end
    double step_s_total;                 // the seconds that committed steps took
    double step_time_error_ratio;        // the error of predictions, as in StepTime
    std::optional<double> prefill_tokens_per_s;  // as in Policy
    std::vector<GroupStats> groups;
};

// What requests want of one KV group's local pool, in blocks: what a lender decides by.
struct GroupDemand {
    int total_peak;  // the largest `total_now` since it was last asked for
    int longest;     // the most that one request wanted since it was last asked for
    int total_now;   // what running and waiting requests want, each to the end of its prompt and a little further
    int shortfall;   // the part of it that neither the pool nor borrowed memory can hold
};

}  // namespace swiftkv
