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

    // The reason for a refusal: there was too little room in `group`, and there is until its room version has grown by
    // `least_growth`. With kNone, the request needed more tokens of the step than were left.
    struct Lack {
        int group = kNone;
        int least_growth = 1;
        int least_growth_if_displacing = 0;  // if all running requests of lower classes left; 0: that may help now
    };
    // Notes that a request was refused beside `num_running` others, with `token_budget` left of the step.
    void note(const Request& request, int num_running, int token_budget, Lack lack);
    // Whether the request would be refused again, even if running requests of lower classes gave way to it.
    bool still_holds(const Request& request, int num_running, int token_budget, bool may_displace) const;
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
        Lack lack;
    };

    const KvCache& cache_;
    std::unordered_map<const Request*, Circumstances> refused_;
};

}  // namespace swiftkv
