// BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs), plain and keyed, for inputs of any length.
//
// Written here because no package brings upstream's C to a build without a network, and to vendor it is ten times these
// lines; tests/core/test_block_keys.py compares every kind of length with upstream's.
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
