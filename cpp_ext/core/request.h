// One request as the scheduler knows it, and its part in one step.
#pragma once

#include <utility>
#include <vector>

#include "kv_cache.h"
#include "types.h"

namespace swiftkv {

struct Request {
    RequestId id;
    int priority;
    uint64_t arrival;  // its number
    int prompt_len;
    int max_tokens;
    int min_tokens;
    bool skip_prefix_match;
    Hash root_key;
    std::vector<TokenId> stop_token_ids;

    std::vector<TokenId> tokens;  // the prompt, then what was sampled
    std::vector<BlockKey> keys;   // of the full blocks of `tokens`; empty without prefix caching
    BlockTable table;
    int num_computed = 0;   // tokens whose KV is in the blocks
    int num_cached = 0;     // of them, found in the prefix cache at admission
    int num_scheduled = 0;  // tokens that steps in progress compute, or the one being planned
    int num_unknown = 0;    // tokens that steps in progress sample: they come behind `tokens`
    int slot = kNone;       // row slot while running
    bool was_admitted = false;
    bool is_in_step = false;    // the one being planned
    bool is_lost = false;       // steps in progress have it, and a block that they read or write is gone
    double stuck_since_s = -1;  // while it waits for room that is not there even if it were alone

    int num_known() const { return static_cast<int>(tokens.size()); }
    int num_tokens() const { return num_known() + num_unknown; }
    int num_planned() const { return num_computed + num_scheduled; }
    int num_remaining() const { return num_tokens() - num_planned(); }
};

// The part of one request in one step.
struct StepRow {
    Request* request;  // null: the row does not count any more
    RequestId id;
    int num_tokens;
    bool samples;
    bool is_dropped = false;                             // the request goes on without it
    std::vector<std::pair<int, BlockId>> arrivals = {};  // as in KvCache
};

}  // namespace swiftkv
