// The part of the scheduler that handles extents, which come and go between and during steps.
#include <algorithm>
#include <mutex>

#include "../common/check.h"
#include "scheduler.h"

namespace swiftkv {

// Makes the cache follow the extents that were borrowed and recalled since the previous step.
void Scheduler::settle_lending() {
    if (!open_.empty()) return;  // the blocks of the step in progress stay where they are
    cache_.shrink_staging();
    if (cache_.is_draining()) {
        while (!cache_.drain(roster_.running_tables())) {
            ensure(roster_.num_running() > 0, "only running requests can block a drain");
            roster_.preempt(policy_.victim(roster_.running()));
            cache_.shrink_staging();  // its blocks are no longer staged; it may begin again in that room
        }
    }
    cache_.grow_staging();
}

std::vector<int> Scheduler::lend(int lend_link, int max_extents) {
    const std::lock_guard lock(mutex_);
    if (is_copying_) return {};  // blocks that storage takes must not be evicted before they are copied
    if (cache_.shares_extents() && is_step_copying()) return {};  // the step still reads moved blocks where they were
    // Blocks that a step in progress copies may be cached already, and must not be evicted before it ends.
    return cache_.lend(lend_link, max_extents, !cache_.can_borrow() || open_.empty());
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
    if (is_copying_) return {};
    return cache_.take_returned(borrow_link);
}

void Scheduler::lose(int borrow_link) {
    const std::lock_guard lock(mutex_);
    cache_.lose(borrow_link);
    drop_lost();
}

std::vector<BlockId> Scheduler::begin_loading(const BlockKey& key) {
    const std::lock_guard lock(mutex_);
    return is_step_copying() || roster_.awaits_loads() ? std::vector<BlockId>{} : cache_.begin_loading(key);
}

void Scheduler::end_loading(std::span<const BlockId> blocks, bool is_loaded) {
    const std::lock_guard lock(mutex_);
    cache_.end_loading(blocks, is_loaded);
}

// Drops requests whose blocks were lost. No step is planned until those in progress are committed, so that no other
// request gets the slot of a dropped one before samplers have taken back, by slot, what they counted for it.
void Scheduler::drop_lost() noexcept {
    for (const Step& step : open_)
        for (const StepRow& row : step.rows)
            if (row.request && reads_lost(row)) row.request->is_lost = must_commit_ = true;
    const std::vector<Request*> running = roster_.running();
    for (Request* r : running) {
        if (!cache_.holds_lost(r->table)) continue;
        if (r->num_scheduled > 0) {
            r->is_lost = must_commit_ = true;
        } else {
            roster_.preempt(*r);
        }
    }
    pins_.drop_broken();
}

// Whether a row reads lost blocks. Checks the row's own blocks, because its request may hold others by now: equal ones
// that were in the cache.
bool Scheduler::reads_lost(const StepRow& row) const {
    return std::any_of(row.arrivals.begin(), row.arrivals.end(),
                       [&](const auto& arrival) { return cache_.is_lost(arrival.first, arrival.second); });
}

std::vector<GroupDemand> Scheduler::take_demand() {
    const std::lock_guard lock(mutex_);
    return demand_.take(roster_.num_running());
}

bool Scheduler::is_short() const {
    const std::lock_guard lock(mutex_);
    return demand_.is_short(roster_.num_running());
}

}  // namespace swiftkv
