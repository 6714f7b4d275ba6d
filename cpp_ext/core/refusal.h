// Remembers why a waiting request found no room, so that its prompt need not be matched in every step.
#pragma once

#include <unordered_map>

#include "kv_cache.h"
#include "request.h"

namespace swiftkv {

// Remembers the waiting requests that found no room, and the circumstances. While these last, such a request is refused
// again without a look-up in the prefix cache.
class Refusal {
  public:
    explicit Refusal(const KvCache& cache) : cache_(cache) {}

    // Notes that a request was refused beside `num_running` others, for want of room in a group. `short_group` is kNone
    // if it needs more tokens of the step than the `token_budget` that was left.
    void note(const Request& request, int num_running, int token_budget, int short_group);
    // Whether the request would be refused again.
    bool still_holds(const Request& request, int num_running, int token_budget) const;
    // Notes that a running request is about to put its first `num_blocks` blocks into the prefix cache.
    void note_commit(const Request& running, int num_blocks);
    // These forget the refusal of a request that is about to end, or all of them.
    void forget(const Request& request) { refused_.erase(&request); }
    void forget() { refused_.clear(); }

  private:
    struct Circumstances {
        int64_t room_version;
        int num_running;
        int token_budget;
        int short_group;
    };

    const KvCache& cache_;
    std::unordered_map<const Request*, Circumstances> refused_;
};

}  // namespace swiftkv
