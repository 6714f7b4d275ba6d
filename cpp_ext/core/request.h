// One request as the scheduler knows it, and its part in one step.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "drafting.h"
#include "kv_cache.h"
#include "plan.h"
#include "scheduler_limits.h"
#include "types.h"

namespace swiftkv {

struct NewRequest {
    RequestId id;
    std::span<const TokenId> prompt;
    int max_tokens;
    int min_tokens;
    std::span<const TokenId> stop_token_ids;
    std::span<const uint8_t> cache_namespace;
    bool skip_prefix_match;
    int64_t priority;
    double arrival_s = 0;                                         // by the clock of schedule()
    double deadline_s = std::numeric_limits<double>::infinity();  // of its first token, by the same clock
    int flow = 0;                                                 // whose share it uses; below FairShare::kMaxFlows
    double flow_weight = 1;
};

struct Request {
    RequestId id;
    int64_t priority;
    uint64_t arrival = 0;  // its number in the order of arrival
    int64_t begun = 0;     // its number in the order of beginning, when it began last
    double arrival_s;
    double deadline_s;
    int flow;
    int prompt_len;
    int last_len;  // the number of tokens at which it ends
    int min_tokens;
    bool skip_prefix_match;
    Hash root_key = {};
    std::vector<TokenId> stop_token_ids;

    std::vector<TokenId> tokens;      // the prompt, then the sampled tokens
    std::vector<TokenId> draft = {};  // guesses at the tokens after `tokens`
    GuessRate guess_rate = {};
    std::vector<BlockKey> keys = {};  // of the full blocks of `tokens`; empty without prefix caching
    BlockTable table = {};
    int num_shared_blocks = 0;  // full blocks before the point where its prompt left a known path; 0: it left none
    int num_computed = 0;       // tokens whose KV is in the blocks
    int num_cached = 0;         // prompt tokens that were found in the prefix cache at admission
    std::vector<int32_t> borrowed_hits = {};  // the blocks of `num_cached` that were found in borrowed memory
    std::vector<int32_t> host_hits = {};      // those that were found in host memory
    int num_window_missed = 0;                // tokens known at admission after `num_cached`, useless without a tail
    int load_end = 0;  // the end, in blocks, of what storage loads for it before it begins; 0: nothing, or it has begun
    int back_end = 0;  // the end, in blocks, of the back that storage loads while the front is computed; 0: none
    double begun_s = 0;  // when a step first had the request
    // The measured time of its front divided by the prediction; nullopt: not known yet.
    std::optional<double> front_slowness = {};
    int num_scheduled = 0;  // tokens that the steps in progress and the one being planned compute
    int num_unknown = 0;    // rows of these steps that sample: each adds at least one token to `tokens`
    int slot = kNone;       // row slot while running
    int displaced_len = 0;  // the number of its tokens when it was displaced last
    bool was_admitted = false;
    bool is_in_step = false;    // the step being planned has it
    bool is_held = false;       // it waits for an answer from storage
    bool is_lost = false;       // steps in progress have it, and a block that they read or write is gone
    bool awaits_loads = false;  // it runs, and will get the blocks that it lacks when loads have ended
    // Since when it has waited for room that it would not have even if it were alone.
    std::optional<double> stuck_since_s = {};
    // Since when it has been the first that waits for room, and could be overtaken.
    std::optional<double> refused_since_s = {};

    // While it waits:
    int num_expected = 0;  // tokens of it that the prefix cache had when they were looked up last
    int lane = 0;          // of the queue
    double rank = 0;       // within the lane

    int num_known() const { return static_cast<int>(tokens.size()); }
    bool has_answer() const { return num_known() > prompt_len; }
    int num_tokens() const { return num_known() + num_unknown; }
    int num_planned() const { return num_computed + num_scheduled; }
    // The number of tokens to compute, as far as is known while it waits; at least 1.
    int num_left() const { return std::max(1, num_remaining() - num_expected); }
    // Below 1 while a step in progress has a draft: the token after it is not known before the step is over.
    int num_remaining() const { return num_tokens() - num_planned(); }
    // Whether more of its prompt than the last token is left to compute.
    bool is_prompt_in_part() const { return num_unknown == 0 && num_remaining() > 1; }
    // Whether a step in progress samples its last token.
    bool is_ending() const { return num_unknown > 0 && num_tokens() >= last_len; }
    // The number of its blocks that may be taken from the prefix cache: never its last token, which must be computed
    // to sample the next one.
    int max_match_blocks(int block_size) const {
        return std::min(static_cast<int>(keys.size()), (num_tokens() - 1) / block_size);
    }

    // Adds the keys of the blocks that are full by now.
    void extend_keys(const SchedulerLimits& limits);
    // Appends a sampled token, and forgets the draft, which followed the token before. Returns whether, and why, the
    // request ends with it.
    FinishReason append(TokenId token, const SchedulerLimits& limits);
};

// Whether all are token ids. A number below 0 stands for a token that a step in progress samples.
bool are_tokens(std::span<const TokenId> ids);
// Throws std::invalid_argument unless a scheduler with these limits can serve the request.
void check_request(const NewRequest& request, const SchedulerLimits& limits);
std::unique_ptr<Request> make_request(const NewRequest& request, const SchedulerLimits& limits);

// The part of one request in one step.
struct StepRow {
    Request* request;  // null: the row no longer counts
    RequestId id;
    int num_tokens;
    bool samples;                                        // after its last known token, and after each guess
    std::vector<TokenId> draft = {};                     // its last tokens, which are guesses
    bool is_dropped = false;                             // the request goes on without this row
    std::vector<std::pair<int, BlockId>> arrivals = {};  // as in KvCache

    // The number of tokens after which the row samples: its last ones.
    int num_samples() const { return samples ? 1 + static_cast<int>(draft.size()) : 0; }
};

}  // namespace swiftkv
