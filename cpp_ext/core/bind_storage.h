// The parts of the binding that are about storage and about events.
#pragma once

#include <nanobind/nanobind.h>

#include "scheduler.h"

namespace swiftkv {

void bind_storage(nanobind::class_<Scheduler>& scheduler);
void bind_events(nanobind::class_<Scheduler>& scheduler);

}  // namespace swiftkv
