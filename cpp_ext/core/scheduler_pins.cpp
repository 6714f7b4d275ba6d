// Prefixes that are pinned, between the steps of a scheduler and in the middle of them.
#include <mutex>
#include <stdexcept>
#include <string>

#include "scheduler.h"

namespace swiftkv {

PinOutcome Scheduler::pin(PinId id, std::span<const BlockKey> keys, double max_share) {
    const std::lock_guard lock(mutex_);
    if (pins_.contains(id)) throw std::invalid_argument("pin " + std::to_string(id) + " is already known");
    const PinOutcome outcome = pins_.add(id, keys, max_share);
    note_demand();
    return outcome;
}

bool Scheduler::unpin(PinId id) {
    const std::lock_guard lock(mutex_);
    return pins_.remove(id);
}

std::vector<PinId> Scheduler::take_lost_pins() {
    const std::lock_guard lock(mutex_);
    return pins_.take_lost();
}

// Called when a request could run if it were alone, and no other runs or loads: then pins are in its way, or blocks
// that it would find in the prefix cache.
void Scheduler::clear_the_way(StepBuilder& step) {
    if (roster_.num_running() > 0 || !open_.empty() || cache_.has_loading()) return;
    while (step.is_empty() && step.has_refused() && pins_.give_way()) {
        settle_lending();  // room that pins have left may be wanted to stage in
        step.admit_oversized_prompt();
        step.admit_waiting();
    }
    if (step.is_empty() && step.has_refused()) step.admit_unmatched();
}

}  // namespace swiftkv
