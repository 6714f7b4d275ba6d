// The blocks of one KV group, and the copies of them that a step makes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "block_pool.h"
#include "types.h"

namespace swiftkv {

// A whole block that a step copies, layer by layer.
struct BlockCopy {
    BlockId borrowed, local;
};

// A whole block that a step moves from one extent to another, through the layer-stream cache.
struct BlockMove {
    BlockId from, to;
};

// A whole block that a step copies from a pinned chunk of host memory, layer by layer.
struct ChunkCopy {
    int chunk;
    BlockId local;
};

// The state of one KV group in the cache.
struct KvGroup {
    GroupSpec spec;
    int num_tail;  // of a window group: the number of blocks before a match's end that must be resident
    BlockPool pool;
    std::vector<int> borrow_links;      // the engine's numbers of the pool's links
    std::vector<BlockId> staging = {};  // the blocks of the layer-stream cache
    int num_fresh = 0;          // how many of the last ones cannot stage yet: this step still spills their bytes
    int64_t num_unfreshed = 0;  // counts blocks that have ceased to be fresh
    std::vector<BlockCopy> spills = {};        // local to borrowed
    std::vector<BlockCopy> moves_in = {};      // borrowed to local
    std::vector<BlockMove> moves_across = {};  // borrowed to borrowed
    std::vector<ChunkCopy> moves_up = {};  // from host memory to local blocks, which the step holds until it settles
    std::vector<ChunkCopy> coming = {};    // the same for the next step; the blocks are loading until then
    std::vector<BlockId> missing = {};     // ascending: targets of moves whose source was lost meanwhile
    std::vector<int> num_gone = {};        // scratch of KvCache::releases_needed(), by block: 0 before and after it

    bool has_window() const { return spec.window > 0; }
};

}  // namespace swiftkv
