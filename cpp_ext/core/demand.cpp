#include "demand.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace swiftkv {
namespace {

int at_most_int(int64_t count) {
    return static_cast<int>(std::min<int64_t>(count, std::numeric_limits<int>::max()));
}

}  // namespace

Demand::Demand(const KvCache& cache, const SchedulerLimits& limits)
    : cache_(cache), limits_(limits), waiting_blocks_(cache.num_groups()), peaks_(cache.num_groups()) {}

template <class NumBlocks>
int Demand::lendable_blocks(int g, NumBlocks&& num_blocks) const {
    if (!cache_.shares_extents()) return at_most_int(num_blocks(g));
    int64_t num_extents = 0;
    for (int h = 0; g == 0 && h < cache_.num_groups(); ++h)
        num_extents += extents_for(cache_.spec(h), at_most_int(num_blocks(h)));
    return at_most_int(num_extents * cache_.spec(g).blocks_per_extent);
}

void Demand::add_waiting(const Request& r) {
    for (int g = 0; g < cache_.num_groups(); ++g) waiting_blocks_[g] += blocks_wanted(r, g);
}

void Demand::remove_waiting(const Request& r) {
    for (int g = 0; g < cache_.num_groups(); ++g) waiting_blocks_[g] -= blocks_wanted(r, g);
}

void Demand::note(int num_running) {
    for (int g = 0; g < cache_.num_groups(); ++g) peaks_[g] = of_group(g, num_running);
}

void Demand::note_length(const Request& r) {
    for (int g = 0; g < cache_.num_groups(); ++g) {
        const int wanted = lendable_blocks(g, [&](int h) { return blocks_wanted(r, h); });
        peaks_[g].longest = std::max(peaks_[g].longest, wanted);
    }
}

std::vector<GroupDemand> Demand::take(int num_running) {
    note(num_running);
    return std::exchange(peaks_, std::vector<GroupDemand>(cache_.num_groups()));
}

bool Demand::is_short(int num_running) const {
    for (int g = 0; g < cache_.num_groups(); ++g)
        if (cache_.pool(g).count(Place::kLocal, BlockState::kLent) > 0 && of_group(g, num_running).shortfall > 0)
            return true;
    return false;
}

int Demand::blocks_wanted(const Request& r, int g) const {
    const int whole = ceil_div(r.num_tokens(), limits_.block_size) + 1;
    return std::min(whole, limits_.most_blocks_of_one_sequence(cache_.spec(g)));
}

GroupDemand Demand::of_group(int g, int num_running) const {
    const int total = lendable_blocks(g, [&](int h) {
        const BlockPool& pool = cache_.pool(h);
        const int used =
            pool.count(Place::kLocal, BlockState::kUsed) + pool.count(Place::kLocal, BlockState::kInFlight);
        return used + waiting_blocks_[h] + num_running;
    });
    const int capacity = cache_.num_home_blocks(g) + cache_.pool(g).num_held();
    return {.total_peak = std::max(peaks_[g].total_peak, total),
            .longest = peaks_[g].longest,
            .total_now = total,
            .shortfall = std::max(0, total - capacity)};
}

}  // namespace swiftkv
