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
// Local blocks count from 0 to num_blocks; those that may be borrowed follow, place by place, link by link and extent
// by extent.
using BlockId = int32_t;
using NodeId = int32_t;
// Identifies a full block and everything before it: BLAKE3 of its tokens, keyed with the key of the block before.
using BlockKey = Hash;

// A priority is a class, in steps of kPrioritiesPerClass from 0, which is class 1, and a place within the class. Lower
// ones go first; the last class is batch work.
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

// Block-table entries. One that is not negative is the layer-block index of a block's layer 0, and layer l follows l
// further on. A staged entry names one place that serves every layer in turn: in a request's table the block that must
// be staged, in a plan the layer block of the pool where the step stages it.
inline int32_t staged(int32_t place) {
    return ~place;
}
inline bool is_staged(int32_t entry) {
    return entry < 0 && entry != kNoBlock;
}
inline int32_t staged_place(int32_t entry) {
    return ~entry;
}
// Stands for the token that the step before samples for a row slot.
inline TokenId unknown_token(int slot) {
    return ~slot;
}

// Why a cached block of a sliding-window group stays: blocks that are worth less are evicted first. Blocks of
// full-attention groups are worth nothing in this sense: all of them are needed.
enum class Worth : uint8_t {
    kNone,      // no boundary that is kept needs it
    kInterval,  // a boundary at a regular interval does
    kKept,      // a boundary does at which a request began, ended or left another's path
};
inline constexpr int kNumWorths = 3;

struct GroupSpec {
    int num_layers;
    int num_blocks;
    int window;                     // in tokens, the query's own included; 0: full attention
    int64_t layer_block_bytes = 0;  // for the offsets of copies; 0 where nothing is borrowed
    int64_t base_offset_bytes = 0;  // the offset of the group's first block in the pool
    // The group's blocks in an extent of the pool that groups share: each may have every extent. 0: the group has its
    // blocks to itself.
    int blocks_per_extent = 0;
};

// The extents that one KV group of this engine may lend to one of another, or borrow from it. Groups that share extents
// lend whole ones of these, in the name of the first group.
struct Link {
    int group;
    int num_extents;
    int blocks_per_extent;          // this engine's blocks
    int64_t extent_bytes = 0;       // for a borrower: the pitch of extents in the lender's pool
    int64_t base_offset_bytes = 0;  // for a borrower: where extent 0 lies in the lender's pool
    Place place = Place::kPeer;     // for a borrower: the place that the extents are
};

// Local blocks by state, whose sum is `total`; then borrowed ones.
struct GroupStats {
    int free, used, cached, lent, in_flight, staging, loading;
    int elsewhere;  // in extents of other groups, or of none
    int total;
    int borrowed_free, borrowed_used, borrowed_cached, borrowed_in_flight;
    int staging_layer_blocks;  // the layer blocks in which borrowed blocks can be staged
    int pinned = 0;            // the used blocks that pins hold
};

// Divides a >= 0 by b > 0, without a sum that overflows.
inline int ceil_div(int a, int b) {
    return a / b + (a % b != 0);
}

// The extents of a pool that groups share in which one finds so many blocks, whatever part of an extent others of its
// blocks take.
inline int extents_for(const GroupSpec& spec, int num_blocks) {
    return num_blocks == 0 ? 0 : ceil_div(num_blocks, spec.blocks_per_extent) + (spec.blocks_per_extent > 1);
}

// How many extents of a shared pool stage the blocks that a group borrows: enough for all of them, but at most `most`,
// and no more than have room for as many blocks as are borrowed. Windows are short and are not staged: a borrowed block
// of a window moves to the pool when it is used.
inline int staging_extents(const GroupSpec& spec, int num_borrowed, int most) {
    if (spec.window > 0) return 0;
    const int size = spec.blocks_per_extent;
    return std::min({ceil_div(num_borrowed, size * spec.num_layers), num_borrowed / size, most});
}

// The blocks that a token at the begin of a block looks back on, itself not counted: the tail of a boundary.
inline int tail_blocks(const GroupSpec& window_group, int block_size) {
    return ceil_div(window_group.window - 1, block_size);
}

}  // namespace swiftkv
