// The input and the result of a step, as flat arrays ready to become tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "step_time.h"
#include "types.h"

namespace swiftkv {

// Copies of layer blocks between our pool and lenders' pools or host memory, as runs. Row i of `rows` is
//   link, peer_offset_bytes, local_offset_bytes, count, staged
// and copies `count` layer blocks of layer 0. In the peer's pool, they lie one block apart, and those of layer l lie l
// layer blocks further on. The same holds in our pool, unless they are staged: then they are contiguous, at the same
// address for every layer.
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

// A request that has computed the front of its prompt and skips the rest, blocks `first` to `end`, because storage has
// loaded them meanwhile.
struct Meeting {
    RequestId id;
    int first, end;
};

// The plan of a step that computes T tokens of S sequences. The step samples after R of them: a sequence's last known
// token and each token of its draft, but no token of a prompt that it does not finish. A plan may have only copies.
struct StepPlan {
    std::vector<TokenId> token_ids;      // [T] or unknown_token(row slot)
    std::vector<int32_t> positions;      // [T]
    std::vector<int32_t> query_starts;   // [S+1] into T, where each sequence begins
    std::vector<int32_t> context_lens;   // [S] tokens with KV after this step
    std::vector<RequestId> request_ids;  // [S]
    std::vector<int32_t> row_slots;      // [S]
    // Per stream buffer (one if nothing is streamed) and group [sum of blocks]: the entries for the layers l with
    // l % num_stream_buffers == buffer.
    std::vector<std::vector<std::vector<int32_t>>> stream_tables;
    std::vector<std::vector<int32_t>> table_starts;  // per group [S+1]
    std::vector<int32_t> logits_rows;                // [R] into T, ascending
    std::vector<int32_t> logits_seqs;                // [R] into S
    bool has_unknown_tokens = false;
    int num_prompt_tokens = 0;
    StepWork work;
    std::vector<RequestId> new_request_ids;    // [A] admitted for the first time
    std::vector<int32_t> new_cached_tokens;    // [A] the number of prompt tokens found in the cache
    std::vector<int32_t> new_borrowed_starts;  // [A+1] into new_borrowed_blocks, where each request begins
    std::vector<int32_t> new_borrowed_blocks;  // indices of a prompt's blocks that were found in borrowed memory
    std::vector<int32_t> new_host_starts, new_host_blocks;  // the same for host memory
    std::vector<double> new_arrivals_s;                     // [A] times of arrival
    std::vector<RequestId> met_request_ids;                 // [M] the requests of meetings
    std::vector<int32_t> met_blocks;                        // [M, 2] `first` and `end` of each Meeting
    std::vector<RequestId> preempted_request_ids;           // [P]
    int num_stream_buffers = 0;                             // 0: nothing is staged, or loaded from host memory
    std::vector<GroupCopies> copies;                        // per group
    std::vector<int32_t> local_moves;  // [N, 3] group, from, to: before anything else, in this order
};

// kDropped: the request goes on, but blocks that it needed were lost during the step, so it is computed again.
// kBroken: no token was sampled for the request, and what the step computed for it is not kept.
// kRejected: the token was sampled after a wrong guess, or after the token that ended the request.
enum class FinishReason : uint8_t {
    kRunning = 0,
    kStop = 1,
    kLength = 2,
    kAborted = 3,
    kDropped = 4,
    kBroken = 5,
    kRejected = 6
};

// The result of a step, with the plan's R rows of logits_rows and its S sequences.
struct StepResult {
    std::vector<RequestId> request_ids;   // [R]
    std::vector<TokenId> token_ids;       // [R]
    std::vector<uint8_t> finish_reasons;  // [R] FinishReason
    std::vector<uint8_t> counts;          // [S] 1; 0 if nothing is kept that the step computed for the sequence
};

struct SchedulerStats {
    int num_running, num_waiting;
    int64_t num_preemptions_total;
    CountByClass num_displaced_total;  // preemptions in favour of a higher class
    int64_t prefix_matches_total;      // look-ups of prompts in the prefix cache
    int64_t prefix_query_tokens_total, prefix_hit_tokens_total;
    int64_t borrowed_hit_tokens_total;   // the hits that lay in borrowed blocks
    int64_t window_missed_tokens_total;  // tokens after the hits that were known, but of no use without a tail
    int64_t drafts_total;                // rows that had a draft
    int64_t draft_tokens_total, accepted_draft_tokens_total;  // the guesses in them, and those that were right
    double step_s_total;                                      // the seconds that committed steps took
    double step_time_error_ratio;                             // the error of predictions, as in StepTime
    std::optional<double> prefill_tokens_per_s;               // as in Policy
    std::vector<GroupStats> groups;
};

// The number of blocks that requests want of one KV group's local pool. Lenders decide by it.
struct GroupDemand {
    int total_peak;  // the largest `total_now` since the last Demand::take()
    int longest;     // the most that one request wanted since the last Demand::take()
    int total_now;   // wanted by all running and waiting requests, each for its tokens so far and a little further
    int shortfall;   // the part of `total_now` that neither the pool nor borrowed memory can hold
};

}  // namespace swiftkv
