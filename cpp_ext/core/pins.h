// Prefixes that stay in the local pool, though no request holds them.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "kv_cache.h"
#include "types.h"

namespace swiftkv {

using PinId = uint64_t;

struct PinOutcome {
    int length;    // of the prefix that is here, in blocks
    double share;  // of the pool that all pins take with it: of groups that do not share extents, the largest share
    bool is_kept;
};

// A pin holds blocks as a request does, so that whatever moves or counts the blocks of requests does so with those of
// pins. It holds only local ones: a lender gets its extents back whatever is pinned, and no pin takes a place in the
// layer-stream cache. Requests come before pins: one that could run if it were alone never waits for the end of a pin.
class Pins {
  public:
    explicit Pins(KvCache& cache) : cache_(cache) {}

    bool contains(PinId id) const;
    // Holds the longest usable prefix of `keys` whose blocks are in the local pool, unless none is or pins would take
    // more than `max_share` of the pool.
    PinOutcome add(PinId id, std::span<const BlockKey> keys, double max_share);
    // Returns whether there was such a pin.
    bool remove(PinId id);
    // Gives up the oldest pin; false if there is none.
    bool give_way();
    // Gives up the pins whose bytes are lost, in part or all of them: a copy that should have brought them failed.
    void drop_broken();
    // Pins that were given up since the last call.
    std::vector<PinId> take_lost() { return std::exchange(lost_, {}); }

    // The tables of all pins.
    std::vector<BlockTable*> tables();
    // The group's blocks that pins hold; one that several hold counts once.
    int num_blocks(int group) const;
    // Adds the tables and their keys to those of requests, for KvCache::check. Throws std::runtime_error unless every
    // pin has its blocks in the local pool and in the prefix index.
    void check(std::vector<const BlockTable*>& tables, std::vector<const std::vector<BlockKey>*>& keys) const;

  private:
    struct Pin {
        PinId id;
        std::vector<BlockKey> keys;  // of the blocks that it keeps
        BlockTable table;
    };
    double share() const;

    KvCache& cache_;
    std::deque<Pin> pins_;  // the oldest first
    std::vector<PinId> lost_;
};

}  // namespace swiftkv
