// The part of the scheduler that handles pins.
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

// Gives up pins, and then prefix matches, for a request that could run if it were alone. If no other request runs and
// nothing loads, only pins can be in its way, or the blocks that it would find in the prefix cache.
void Scheduler::clear_the_way(StepBuilder& step) {
    if (roster_.num_running() > 0 || !open_.empty() || cache_.has_loading()) return;
    while (step.is_empty() && step.has_refused() && pins_.give_way()) {
        settle_lending();  // the layer-stream cache may need the room that the pin has left
        step.admit_oversized_prompt();
        step.admit_waiting();
    }
    if (step.is_empty() && step.has_refused()) step.admit_unmatched();
}

}  // namespace swiftkv
