// BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs), plain and keyed, for inputs of any length.
//
// Implemented here because no package brings upstream's C code to a build without a network, and vendoring it would
// take ten times as many lines. tests/core/test_block_keys.py compares every kind of length with upstream.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace swiftkv {

// 32 bytes as little-endian words, the form in which BLAKE3 chains them.
using Hash = std::array<uint32_t, 8>;

Hash blake3(std::span<const uint8_t> input);
Hash blake3_keyed(const Hash& key, std::span<const uint8_t> input);

}  // namespace swiftkv
