// The few words that every file of the core uses.
#pragma once

#include <cstdint>
#include <limits>

#include "blake3.h"

namespace swiftkv {

using TokenId = int32_t;
using RequestId = uint64_t;
using BlockId = int32_t;
using NodeId = int32_t;
// Identifies a full block and everything before it: BLAKE3 of its tokens, keyed with the key of the block before.
using BlockKey = Hash;

inline constexpr BlockId kNone = -1;
// Block-table entry of a block that a sliding window has left behind.
inline constexpr int32_t kNoBlock = std::numeric_limits<int32_t>::min();

struct GroupSpec {
    int num_layers;
    int num_blocks;
    int window;  // in tokens; 0: full attention
};

struct GroupStats {
    int free, used, cached, lent, in_flight, total;
};

inline int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

}  // namespace swiftkv
