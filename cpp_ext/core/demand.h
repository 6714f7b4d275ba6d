// The KV cache that requests want. Lenders decide by it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "../common/check.h"
#include "kv_cache.h"
#include "plan.h"
#include "request.h"
#include "scheduler_limits.h"

namespace swiftkv {

// Counts, per KV group, the blocks that running and waiting requests want of the local pool. Groups that share extents
// lend together: the first group has the demand of all, counted in its blocks, and the others have 0.
class Demand {
  public:
    Demand(const KvCache& cache, const SchedulerLimits& limits);

    // Notes that a request begins to wait, or stops waiting.
    void add_waiting(const Request& request);
    void remove_waiting(const Request& request);
    // Raises the peaks to the demand of this moment.
    void note(int num_running);
    // Raises the length of the longest request.
    void note_length(const Request& request);
    // Returns the demand of every group, and resets the peaks.
    std::vector<GroupDemand> take(int num_running);
    // Whether some group has a shortfall while blocks of it are lent.
    bool is_short(int num_running) const;

    // Throws std::runtime_error unless the demand of the `waiting` requests is counted.
    template <class Requests>
    void check(const Requests& waiting) const;

  private:
    // The number of blocks for the tokens that a request has, and one more for it to grow into.
    int blocks_wanted(const Request& request, int group) const;
    // Returns the blocks that a lender counts for each group if the groups want these. Requests may want more than an
    // int can count: then it is the largest int.
    std::vector<int> as_lent(std::span<const int64_t> wanted) const;
    // Returns the demand of every group, with the peaks that it reaches now.
    std::vector<GroupDemand> now(int num_running) const;

    const KvCache& cache_;
    const SchedulerLimits& limits_;
    std::vector<int64_t> waiting_blocks_;
    std::vector<GroupDemand> peaks_;
};

template <class Requests>
void Demand::check(const Requests& waiting) const {
    std::vector<int64_t> wanted(cache_.num_groups());
    for (const Request* r : waiting)
        for (int g = 0; g < cache_.num_groups(); ++g) wanted[g] += blocks_wanted(*r, g);
    check_that(wanted == waiting_blocks_, "the blocks that waiting requests want are counted");
}

}  // namespace swiftkv
