// The blocks of one KV group: who holds them, which are cached, which are free.
#pragma once

#include <cassert>
#include <vector>

#include "types.h"

namespace swiftkv {

// Every block is in exactly one state, so free + used + cached + lent + in_flight = total:
//   free       nobody needs its bytes
//   used       running requests hold references to it (it may be in the prefix tree too)
//   cached     in the prefix tree, and no request holds it; evicted in least-recently-used order
//   in flight  its request was aborted while a step may still be writing to it
// Nothing is lent yet.
class BlockPool {
  public:
    explicit BlockPool(int num_blocks);

    int total() const { return static_cast<int>(slots_.size()) - 1; }
    // Blocks that an allocation could have: free ones, and cached ones by eviction.
    int available() const { return static_cast<int>(free_.size()) + num_cached_; }
    bool has_free() const { return !free_.empty(); }

    BlockId take_free();
    // A cached block becomes used again; a used one gains a holder.
    void add_ref(BlockId block);
    // The last holder leaves a block cached if the prefix tree knows it, else free.
    void drop_ref(BlockId block);
    // The only holder leaves, but a step may still be writing: free after settle().
    void retire(BlockId block);
    void settle();

    NodeId node(BlockId block) const { return slots_[block].node; }
    void set_node(BlockId block, NodeId node) { slots_[block].node = node; }
    int refs(BlockId block) const { return slots_[block].refs; }

    // Least recently used cached block; kNone if none is cached.
    BlockId oldest_cached() const;
    void free_cached(BlockId block);

    GroupStats stats() const;
    // `refs[b]` is how many references the requests hold. Throws std::runtime_error on any disagreement.
    void check(const std::vector<int>& refs) const;

  private:
    struct Slot {
        int refs = 0;
        NodeId node = kNone;
        BlockId newer = kNone, older = kNone;  // neighbours in the list of cached blocks
    };
    void link_newest(BlockId block);
    void unlink(BlockId block);
    BlockId sentinel() const { return total(); }

    std::vector<Slot> slots_;  // the last is the sentinel of the circular list of cached blocks
    std::vector<BlockId> free_;
    std::vector<BlockId> in_flight_;
    int num_cached_ = 0;
};

}  // namespace swiftkv
