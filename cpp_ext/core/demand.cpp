#include "demand.h"

#include <algorithm>
#include <limits>
#include <ranges>
#include <utility>

namespace swiftkv {
namespace {

int at_most_int(int64_t count) {
    return static_cast<int>(std::min<int64_t>(count, std::numeric_limits<int>::max()));
}

}  // namespace

Demand::Demand(const KvCache& cache, const SchedulerLimits& limits)
    : cache_(cache), limits_(limits), waiting_blocks_(cache.num_groups()), peaks_(cache.num_groups()) {}

std::vector<int> Demand::as_lent(std::span<const int64_t> wanted) const {
    std::vector<int> counts(wanted.size(), 0);
    if (!cache_.shares_extents()) {
        std::ranges::transform(wanted, counts.begin(), at_most_int);
        return counts;
    }
    int64_t num_extents = 0;
    for (int g = 0; g < cache_.num_groups(); ++g) num_extents += extents_for(cache_.spec(g), at_most_int(wanted[g]));
    counts[0] = at_most_int(num_extents * cache_.spec(0).blocks_per_extent);
    return counts;
}

void Demand::add_waiting(const Request& r) {
    for (int g = 0; g < cache_.num_groups(); ++g) waiting_blocks_[g] += blocks_wanted(r, g);
}

void Demand::remove_waiting(const Request& r) {
    for (int g = 0; g < cache_.num_groups(); ++g) waiting_blocks_[g] -= blocks_wanted(r, g);
}

void Demand::note(int num_running) {
    peaks_ = now(num_running);
}

void Demand::note_length(const Request& r) {
    std::vector<int64_t> wanted;
    for (int g = 0; g < cache_.num_groups(); ++g) wanted.push_back(blocks_wanted(r, g));
    const std::vector<int> lent = as_lent(wanted);
    for (int g = 0; g < cache_.num_groups(); ++g) peaks_[g].longest = std::max(peaks_[g].longest, lent[g]);
}

std::vector<GroupDemand> Demand::take(int num_running) {
    note(num_running);
    return std::exchange(peaks_, std::vector<GroupDemand>(cache_.num_groups()));
}

bool Demand::is_short(int num_running) const {
    const auto is_lending = [&](int g) { return cache_.pool(g).count(Place::kLocal, BlockState::kLent) > 0; };
    const auto groups = std::views::iota(0, cache_.num_groups());
    if (std::ranges::none_of(groups, is_lending)) return false;
    const std::vector<GroupDemand> demand = now(num_running);
    return std::ranges::any_of(groups, [&](int g) { return is_lending(g) && demand[g].shortfall > 0; });
}

int Demand::blocks_wanted(const Request& r, int g) const {
    const int whole = ceil_div(r.num_tokens(), limits_.block_size) + 1;
    return std::min(whole, limits_.most_blocks_of_one_sequence(cache_.spec(g)));
}

std::vector<GroupDemand> Demand::now(int num_running) const {
    std::vector<int64_t> wanted = waiting_blocks_;
    for (int g = 0; g < cache_.num_groups(); ++g) {
        const BlockPool& pool = cache_.pool(g);
        wanted[g] += pool.count(Place::kLocal, BlockState::kUsed) + pool.count(Place::kLocal, BlockState::kInFlight);
        wanted[g] += num_running;
    }
    const std::vector<int> totals = as_lent(wanted);
    std::vector<GroupDemand> demand;
    for (int g = 0; g < cache_.num_groups(); ++g) {
        const int capacity = cache_.num_home_blocks(g) + cache_.pool(g).num_held();
        demand.push_back({.total_peak = std::max(peaks_[g].total_peak, totals[g]),
                          .longest = peaks_[g].longest,
                          .total_now = totals[g],
                          .shortfall = std::max(0, totals[g] - capacity)});
    }
    return demand;
}

}  // namespace swiftkv
