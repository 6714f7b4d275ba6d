// Bytes as a history: a setup, then operations.
#pragma once

#include <cstdint>
#include <ostream>
#include <span>

namespace swiftkv::fuzz {

// Runs the history that the bytes stand for against the simulated engine. Every sequence of bytes is one. Returns false
// if the scheduler refuses its setup. Throws Failure, or std::runtime_error of check_invariants(), where the scheduler
// goes wrong. Says what it does on `trace`, unless that is null.
bool run_history(std::span<const uint8_t> bytes, std::ostream* trace);

}  // namespace swiftkv::fuzz
