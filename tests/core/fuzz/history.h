// Turns bytes into a history: a setup, then operations.
#pragma once

#include <cstdint>
#include <ostream>
#include <span>

namespace swiftkv::fuzz {

// Runs the history of these bytes against the simulated engine. Every sequence of bytes is a history. Returns false if
// the scheduler refuses its setup. Throws Failure, or the std::runtime_error of check_invariants(), if the scheduler
// goes wrong. Writes the operations to `trace` unless that is null.
bool run_history(std::span<const uint8_t> bytes, std::ostream* trace);

}  // namespace swiftkv::fuzz
