// The part of the binding that is about storage.
#pragma once

#include <nanobind/nanobind.h>

#include "scheduler.h"

namespace swiftkv {

void bind_storage(nanobind::class_<Scheduler>& scheduler);

}  // namespace swiftkv
