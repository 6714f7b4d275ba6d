// The parts of the binding for storage, events and pins.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "scheduler.h"

namespace swiftkv {

// Splits bytes into block keys of 32 bytes each. Throws std::invalid_argument if bytes are left over.
std::vector<BlockKey> block_keys_of(nanobind::bytes keys);

void bind_storage(nanobind::class_<Scheduler>& scheduler);
void bind_events(nanobind::class_<Scheduler>& scheduler);
void bind_pins(nanobind::class_<Scheduler>& scheduler);

}  // namespace swiftkv
