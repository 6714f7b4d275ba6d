#include "demand.h"

#include <algorithm>
#include <utility>

namespace swiftkv {

Demand::Demand(const KvCache& cache, const SchedulerLimits& limits)
    : cache_(cache), limits_(limits), waiting_blocks_(cache.num_groups()), peaks_(cache.num_groups()) {}

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
    for (int g = 0; g < cache_.num_groups(); ++g) peaks_[g].longest = std::max(peaks_[g].longest, blocks_wanted(r, g));
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
    const BlockPool& pool = cache_.pool(g);
    const auto local = [&](BlockState state) { return pool.count(Place::kLocal, state); };
    const int used = local(BlockState::kUsed) + local(BlockState::kInFlight);
    const int total = used + waiting_blocks_[g] + num_running;
    const int capacity = pool.num_local() - local(BlockState::kLent) + pool.num_held();
    return {.total_peak = std::max(peaks_[g].total_peak, total),
            .longest = peaks_[g].longest,
            .total_now = total,
            .shortfall = std::max(0, total - capacity)};
}

}  // namespace swiftkv
