// Extents come and go between the steps of a scheduler, and in the middle of them.
#include <algorithm>
#include <mutex>

#include "../common/check.h"
#include "scheduler.h"
#include "scheduler_request.h"

namespace swiftkv {

// The cache follows what has been lent and recalled since the step before.
void Scheduler::settle_lending() {
    if (!open_.empty()) return;  // what it uses stays where it is
    cache_.shrink_staging();
    if (cache_.is_draining()) {
        while (!cache_.drain(running_tables())) {
            ensure(!running_.empty(), "nothing is in the way of a drain when nobody runs");
            preempt(*running_.back());
        }
        cache_.shrink_staging();  // by what those had in use that were preempted
    }
    cache_.grow_staging();
}

std::vector<BlockTable*> Scheduler::running_tables() {
    std::vector<BlockTable*> tables;
    for (Request* r : running_) tables.push_back(&r->table);
    return tables;
}

std::vector<int> Scheduler::lend(int lend_link, int max_extents) {
    const std::lock_guard lock(mutex_);
    // What a step in progress moves may be cached already.
    return cache_.lend(lend_link, max_extents, !borrows_ || open_.empty());
}

void Scheduler::take_back(int lend_link, std::span<const int32_t> extents) {
    const std::lock_guard lock(mutex_);
    cache_.take_back(lend_link, extents);
}

void Scheduler::borrow(int borrow_link, std::span<const int32_t> extents) {
    const std::lock_guard lock(mutex_);
    cache_.borrow(borrow_link, extents);
}

void Scheduler::recall(int borrow_link, std::span<const int32_t> extents) {
    const std::lock_guard lock(mutex_);
    cache_.recall(borrow_link, extents);
}

std::vector<int> Scheduler::take_returned(int borrow_link) {
    const std::lock_guard lock(mutex_);
    return cache_.take_returned(borrow_link);
}

void Scheduler::lose(int borrow_link) {
    const std::lock_guard lock(mutex_);
    cache_.lose(borrow_link);
    drop_lost();
}

void Scheduler::drop_lost() noexcept {
    for (const Step& step : open_)
        for (const StepRow& row : step.rows)
            if (row.request && reads_lost(row)) row.request->is_lost = must_commit_ = true;
    const std::vector<Request*> running = running_;
    for (Request* r : running) {
        if (!cache_.holds_lost(r->table)) continue;
        if (r->num_scheduled > 0) {
            r->is_lost = must_commit_ = true;
        } else {
            preempt(*r);
        }
    }
}

// Its request may have other blocks by now, equal ones that were in the cache.
bool Scheduler::reads_lost(const StepRow& row) const {
    return std::any_of(row.arrivals.begin(), row.arrivals.end(),
                       [&](const auto& arrival) { return cache_.is_lost(arrival.first, arrival.second); });
}

// To the end of what it has, and the block that it then grows into.
int Scheduler::blocks_wanted(const Request& r, int g) const {
    const int whole = ceil_div(r.num_tokens(), limits_.block_size) + 1;
    return std::min(whole, limits_.blocks_for_one_sequence(cache_.spec(g)));
}

GroupDemand Scheduler::demand(int g) const {
    const BlockPool& pool = cache_.pool(g);
    const auto local = [&](BlockState state) { return pool.count(Place::kLocal, state); };
    const int used = local(BlockState::kUsed) + local(BlockState::kInFlight);
    const int total = used + waiting_blocks_[g] + static_cast<int>(running_.size());
    const int capacity = pool.num_local() - local(BlockState::kLent) + pool.num_held();
    return {.total_peak = std::max(demand_[g].total_peak, total),
            .longest = demand_[g].longest,
            .total_now = total,
            .shortfall = std::max(0, total - capacity)};
}

void Scheduler::note_demand() {
    for (int g = 0; g < cache_.num_groups(); ++g) demand_[g] = demand(g);
}

void Scheduler::note_length(const Request& r) {
    for (int g = 0; g < cache_.num_groups(); ++g)
        demand_[g].longest = std::max(demand_[g].longest, blocks_wanted(r, g));
}

std::vector<GroupDemand> Scheduler::take_demand() {
    const std::lock_guard lock(mutex_);
    note_demand();
    std::vector<GroupDemand> taken = demand_;
    demand_.assign(cache_.num_groups(), {});
    return taken;
}

bool Scheduler::is_short() const {
    const std::lock_guard lock(mutex_);
    for (int g = 0; g < cache_.num_groups(); ++g)
        if (cache_.pool(g).count(Place::kLocal, BlockState::kLent) > 0 && demand(g).shortfall > 0) return true;
    return false;
}

}  // namespace swiftkv
