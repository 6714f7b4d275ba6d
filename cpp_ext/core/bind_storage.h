// The parts of the binding that are about storage, about events and about pins.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "scheduler.h"

namespace swiftkv {

// Block keys from bytes, of which each has 32. Throws std::invalid_argument.
std::vector<BlockKey> block_keys_of(nanobind::bytes keys);

void bind_storage(nanobind::class_<Scheduler>& scheduler);
void bind_events(nanobind::class_<Scheduler>& scheduler);
void bind_pins(nanobind::class_<Scheduler>& scheduler);

}  // namespace swiftkv
