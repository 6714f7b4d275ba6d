// The types that every file of the core uses.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "blake3.h"
#include "place.h"

namespace swiftkv {

using TokenId = int32_t;
using RequestId = uint64_t;
// Local blocks have the ids from 0 to num_blocks - 1. The ids of blocks that can be borrowed follow, link by link and
// extent by extent, and then those of the chunks of host memory.
using BlockId = int32_t;
using NodeId = int32_t;
// Identifies a full block and everything before it: BLAKE3 of its tokens, keyed with the key of the block before.
using BlockKey = Hash;

// A priority is a multiple of kPrioritiesPerClass, which names the class (0 is class 1), plus a rank within the class.
// Lower priorities go first; the last class is batch work.
inline constexpr int kNumClasses = 4, kBatchClass = kNumClasses - 1;
inline constexpr int kClassBits = 32;
inline constexpr int64_t kPrioritiesPerClass = int64_t{1} << kClassBits;
using CountByClass = std::array<int64_t, kNumClasses>;

constexpr int class_of(int64_t priority) {
    const int64_t steps = ((priority >> (kClassBits - 1)) + 1) >> 1;  // rounded
    return static_cast<int>(std::clamp<int64_t>(steps + 1, 0, kBatchClass));
}

inline constexpr BlockId kNone = -1;
// Block-table entry of a block that a sliding window has left behind.
inline constexpr int32_t kNoBlock = std::numeric_limits<int32_t>::min();

// Block-table entries. An entry >= 0 is the layer-block index of a block's layer 0; layer l is l indices further. A
// staged entry names one place that serves every layer in turn: in a request's table the block that must be staged, in
// a plan the layer block of the pool in which the step stages it.
inline int32_t staged(int32_t place) {
    return ~place;
}
inline bool is_staged(int32_t entry) {
    return entry < 0 && entry != kNoBlock;
}
inline int32_t staged_place(int32_t entry) {
    return ~entry;
}
// Returns the placeholder for the token that the step before samples for a row slot.
inline TokenId unknown_token(int slot) {
    return ~slot;
}

// The reason to keep a cached block of a sliding-window group. Blocks that are worth less are evicted first. Blocks of
// full-attention groups always have kNone: every prefix needs all of them.
enum class Worth : uint8_t {
    kNone,      // no boundary that is kept needs the block
    kInterval,  // a boundary at a regular interval needs it
    kKept,      // a boundary needs it at which a request began, ended or left another's path
};
inline constexpr int kNumWorths = 3;

// The chunks of host memory in which a group's blocks can be attended, counted in layer blocks from the group's first
// block in the pool on.
struct HostChunks {
    int first = 0, stride = 1;  // the first chunk, and the distance from one to the next
    int count = 0;
};

// The chunks of host memory from which steps copy a group's blocks to the pool. Each holds one block, and they lie side
// by side from `offset_bytes` of the memory on.
struct HostSource {
    int64_t offset_bytes = 0;
    int count = 0;
};

struct GroupSpec {
    int num_layers;
    int num_blocks;
    int window;                     // in tokens, the query's own included; 0: full attention
    int64_t layer_block_bytes = 0;  // for the offsets of copies; may be 0 if nothing is borrowed
    int64_t base_offset_bytes = 0;  // the offset of the group's first block in the pool
    // The number of the group's blocks that one extent holds, in a pool whose extents any group may take. 0: the group
    // has its blocks to itself.
    int blocks_per_extent = 0;
    HostChunks host = {};
    HostSource source = {};  // a group has no chunks here if it is attended in others
};

// The extents that one KV group of this engine may lend to a group of another engine, or borrow from it. If groups
// share extents, the links that lend them all name the first group.
struct Link {
    int group;
    int num_extents;
    int blocks_per_extent;          // this engine's blocks
    int64_t extent_bytes = 0;       // for a borrower: the pitch of extents in the lender's pool
    int64_t base_offset_bytes = 0;  // for a borrower: the offset of extent 0 in the lender's pool
};

// The number of local blocks in each state, `total` together, of borrowed blocks, and of blocks in host memory.
struct GroupStats {
    int free, used, cached, lent, in_flight, staging, loading;
    int elsewhere;  // in extents that other groups have, or no group
    int total;
    int borrowed_free, borrowed_used, borrowed_cached, borrowed_in_flight;
    int staging_layer_blocks;  // the layer blocks in which borrowed blocks can be staged
    int host_used, host_cached, host_in_flight, host_loading;
    int pinned = 0;  // the used blocks that pins hold
};

// Divides a >= 0 by b > 0 and rounds up; cannot overflow.
inline int ceil_div(int a, int b) {
    return a / b + (a % b != 0);
}

// Returns the number of shared extents in which a group is sure to find `num_blocks` blocks, even if its other blocks
// take a part of one.
inline int extents_for(const GroupSpec& spec, int num_blocks) {
    return num_blocks == 0 ? 0 : ceil_div(num_blocks, spec.blocks_per_extent) + (spec.blocks_per_extent > 1);
}

// Returns the number of shared extents that stage the blocks that a group borrows: enough for all of them, but at most
// `most`, and no more than the borrowed blocks themselves would fill. Blocks of sliding windows are few and are not
// staged: when such a borrowed block is used, it moves to the pool.
inline int staging_extents(const GroupSpec& spec, int num_borrowed, int most) {
    if (spec.window > 0) return 0;
    const int size = spec.blocks_per_extent;
    return std::min({ceil_div(num_borrowed, size * spec.num_layers), num_borrowed / size, most});
}

// Returns the length in blocks of a boundary's tail: the blocks before it that the next token attends to.
inline int tail_blocks(const GroupSpec& window_group, int block_size) {
    return ceil_div(window_group.window - 1, block_size);
}

}  // namespace swiftkv
