// Prefixes that stay in the local pool even if no request holds them.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kv_cache.h"
#include "types.h"

namespace swiftkv {

using PinId = uint64_t;

struct PinOutcome {
    int length;  // the length in blocks of the prefix that is here
    // The part of the pool that pins take, this one included. If groups do not share extents: the largest part that
    // pins take of any group.
    double share;
    bool is_kept;
};

// A pin holds blocks as a request does, so code that moves or counts the blocks of requests handles those of pins too.
// It holds only local blocks: a lender gets its extents back whatever is pinned, and no pin takes room in the
// layer-stream cache. Requests go before pins: a request that could run if it were alone never waits for a pin to end.
class Pins {
  public:
    explicit Pins(KvCache& cache) : cache_(cache), num_holders_(cache.num_groups()) {}

    bool contains(PinId id) const;
    // Holds the longest usable prefix of `keys` whose blocks are in the local pool, unless there is none, or pins would
    // take more than `max_share` of the pool.
    PinOutcome add(PinId id, std::span<const BlockKey> keys, double max_share);
    // Removes a pin; returns whether there was such a pin.
    bool remove(PinId id);
    // Gives up the oldest pin; returns false if there is none.
    bool give_way();
    // Gives up the pins that have lost bytes because a copy of them failed.
    void drop_broken();
    // Returns the pins that were given up since the last call.
    std::vector<PinId> take_lost() { return std::exchange(lost_, {}); }

    // The tables of all pins.
    std::vector<BlockTable*> tables();
    // The number of the group's blocks that pins hold; a block that several pins hold counts once.
    int num_blocks(int group) const { return static_cast<int>(num_holders_[group].size()); }
    // Adds the pins' tables and keys to those of requests, for KvCache::check. Throws std::runtime_error unless every
    // pin has its blocks in the local pool and in the prefix index.
    void check(std::vector<const BlockTable*>& tables, std::vector<const std::vector<BlockKey>*>& keys) const;

  private:
    struct Pin {
        PinId id;
        std::vector<BlockKey> keys;  // of the blocks that it holds
        BlockTable table;
    };
    struct KeyHash {
        size_t operator()(const BlockKey& key) const { return key[0]; }  // a key is a hash already
    };
    // Adds `by` to the counts of the blocks that a pin holds.
    void count(const Pin& pin, int by);
    void let_go(Pin& pin);
    double share() const;

    KvCache& cache_;
    std::deque<Pin> pins_;  // the oldest first
    // How many pins hold the block of a key, per group. The key stays the same when the block moves.
    std::vector<std::unordered_map<BlockKey, int, KeyHash>> num_holders_;
    std::vector<PinId> lost_;
};

}  // namespace swiftkv
