// The part of the cache that hands extents of the pool from one KV group to another, and to peers, as the division
// decides. `wanted` is what division.h says.
#include <algorithm>
#include <unordered_map>
#include <utility>

#include "../common/check.h"
#include "kv_cache.h"

namespace swiftkv {

// Divides the needed blocks: as many as fit the pool are local, the others are staged.
Portions KvCache::portions(std::span<const int> needed, Spare spare) const {
    Portions found{{needed.begin(), needed.end()}, std::vector<int>(needed.size(), 0), {}};
    for (int g = 0; g < num_groups(); ++g) found.wanted.push_back(wanted_of(g, needed[g], spare.of(spec(g)), 0, {}));
    for (int g = 0; g < num_groups() && !division_.fits(found.wanted, Means::kEviction); ++g) {
        const auto fits = [&](int staged) {
            found.wanted[g] = wanted_of(g, needed[g], spare.of(spec(g)), staged, {});
            return division_.fits(found.wanted, Means::kEviction);
        };
        int too_few = 0, enough = std::min(needed[g], available_staged(g, {}));
        const bool is_enough = fits(enough);
        while (is_enough && enough - too_few > 1) {
            const int middle = (too_few + enough) / 2;
            (fits(middle) ? enough : too_few) = middle;
        }
        found.staged[g] = enough;
        found.local[g] -= enough;
        found.wanted[g] = wanted_of(g, needed[g], spare.of(spec(g)), enough, {});
    }
    return found;
}

// Adds the needed blocks to a table. Takes borrowed ones first: cached blocks that leave the pool would take them.
void KvCache::extend_in_house(BlockTable& table, std::span<const int> needed, Spare spare) {
    Portions taken = portions(needed, spare);
    const auto put = [&](int g, BlockId block) {
        ensure(block != kNone, "there are as many blocks as were counted");
        table.groups[g].entries.push_back(entry_of(g, block));
    };
    std::vector<std::vector<BlockId>> below(groups_.size());
    for (int g = 0; g < num_groups(); ++g)
        for (int i = 0; i < taken.staged[g]; ++i) below[g].push_back(take_peer(g));
    // Blocks in use that cannot be staged move in next: a block taken before them could keep extents from them.
    std::vector<int> entered = taken.local;
    for (int g = 0; g < num_groups(); ++g) entered[g] += overdraft(g);
    enter_missing(entered, taken.wanted);
    for (int g = 0; g < num_groups(); ++g) {
        BlockPool& pool = groups_[g].pool;
        for (; taken.local[g] > 0; --taken.local[g], --taken.wanted[g]) {
            const BlockId own = find_free(g, taken.wanted);
            if (own != kNone) demote(g, own);
            enter_if_full(g);
            put(g, pool.take(Place::kLocal));
        }
        for (BlockId block : below[g]) put(g, block);
    }
}

// Gives every group the extents that it lacks to have the needed blocks. This comes before any block is taken, because
// a taken block may keep its extent from changing hands.
void KvCache::enter_missing(std::span<const int> needed, std::span<const int> wanted) {
    if (!division_.is_shared()) return;
    for (int g = 0; g < num_groups();) {
        if (groups_[g].pool.available(Place::kLocal) >= needed[g]) {
            ++g;
            continue;
        }
        if (!division_.has_extent_for(g)) {
            const int donor = division_.cheapest_donor(g, wanted);
            ensure(donor != kNone, "there are as many extents as were counted");
            empty_oldest(donor);
        }
        groups_[g].pool.enter(division_.house()->take(g));
        g = 0;  // other groups may have lost blocks, and extents, together with an evicted full-attention block
    }
}

// Makes sure that the group has a free local block, or returns the group's block that must be evicted for it. A group
// that can evict a block of its own takes no extent that another group lacks.
BlockId KvCache::find_free(int g, std::span<const int> wanted) {
    BlockPool& pool = groups_[g].pool;
    if (pool.num_free(Place::kLocal) > 0) return kNone;
    const BlockId own = pool.oldest_cached(Place::kLocal);
    if (!division_.has_extent_for(g, own == kNone ? 0 : division_.missing_extents(wanted))) {
        ensure(own != kNone, "there is as much room as was counted");
        const int donor = division_.cheapest_donor(g, wanted);
        if (donor == kNone) return own;
        const CachedBlock last_of_donor{donor, groups_[donor].pool.last_of_oldest_open()};
        if (!division_.goes_before(last_of_donor, {g, own})) return own;
        empty_oldest(donor);
    }
    enter_if_full(g);
    return kNone;
}

// Takes an extent if no block is free: the evicted block may have been the last of its extent, which then went back to
// the house.
void KvCache::enter_if_full(int g) {
    BlockPool& pool = groups_[g].pool;
    if (pool.num_free(Place::kLocal) == 0) pool.enter(division_.house()->take(g));
}

// Frees a local block without a copy, as no step is being planned. There must be room for the wanted blocks.
void KvCache::free_one(int g, std::span<const int> wanted) {
    if (!division_.is_shared()) {
        const BlockPool& pool = groups_[g].pool;
        if (pool.num_free(Place::kLocal) == 0) evict(g, pool.oldest_cached(Place::kLocal));
        return;
    }
    if (const BlockId own = find_free(g, wanted); own != kNone) evict(g, own);
    enter_if_full(g);
}

// Frees a local block; returns false if that is impossible. Other groups keep the blocks that they need.
bool KvCache::make_room_in_house(int g) {
    std::vector<int> wanted, needed(groups_.size(), 0);
    for (int h = 0; h < num_groups(); ++h) wanted.push_back(overdraft(h));
    wanted[g] = std::max(wanted[g], 1);
    needed[g] = 1;
    if (!division_.fits(wanted, Means::kEviction)) return false;
    enter_missing(needed, wanted);
    if (const BlockId own = find_free(g, wanted); own != kNone) demote(g, own);
    enter_if_full(g);
    return true;
}

// Evicts all cached blocks of the oldest open extent, so that it goes back to the house.
void KvCache::empty_oldest(int g) {
    const BlockPool& pool = groups_[g].pool;
    empty(g, pool.house_extent(pool.last_of_oldest_open()));
}

void KvCache::empty(int g, ExtentId extent) {
    const BlockPool& pool = groups_[g].pool;
    const BlockId first = extent * pool.house_extent_blocks();
    for (BlockId b = first; b < first + pool.house_extent_blocks(); ++b)
        if (pool.state(b) == BlockState::kCached) evict(g, b);
    ensure(division_.house()->owner(extent) == kNone, "an extent that is emptied has no owner");
}

// ---- lending ----

// Empties the extents of these blocks, which nothing pins, and gives them to the group.
void KvCache::claim(int g, BlockId first, int num_blocks) {
    if (!division_.is_shared()) return;
    House& house = *division_.house();
    const int size = groups_[g].pool.house_extent_blocks();
    for (ExtentId extent = first / size; extent < (first + num_blocks) / size; ++extent) {
        if (const int owner = house.owner(extent); owner != kNone) empty(owner, extent);
        house.take(g, extent);
        groups_[g].pool.enter(extent);
    }
}

// ---- compaction ----

bool KvCache::compact(const BlockTable& table, int chunk_end, int prompt_end, int spare,
                      std::span<BlockTable* const> tables) {
    // Moves come before copies, and a block that is copied may be free already: a request that took it may be
    // preempted.
    if (!division_.is_shared() || has_copies()) return false;
    const std::vector<int> wanted = wanted_blocks(table, chunk_end, prompt_end, {spare});
    if (!division_.fits(wanted, Means::kCompaction) || division_.fits(wanted, Means::kEviction)) return false;
    while (!division_.fits(wanted, Means::kEviction)) {
        const auto [g, extent] = division_.extent_to_compact(wanted);
        if (g == kNone) return false;
        move_out(g, extent, tables);
    }
    return true;
}

// Moves the used blocks of an extent to other extents that hold used blocks, and empties it. extent_to_compact() has
// checked that there is room.
void KvCache::move_out(int g, ExtentId extent, std::span<BlockTable* const> tables) {
    BlockPool& pool = groups_[g].pool;
    const BlockId first = extent * pool.house_extent_blocks();
    std::unordered_map<int32_t, int32_t> moved;  // by entry
    for (BlockId from = first; from < first + pool.house_extent_blocks(); ++from) {
        if (pool.state(from) != BlockState::kUsed) continue;
        if (pool.free_beside_used(extent) == kNone) evict(g, pool.oldest_cached_beside_used(extent));
        const BlockId to = pool.take(pool.free_beside_used(extent));
        // This does not call point_to(), which reports to routers: for them the same block stays in the same place.
        if (const NodeId node = pool.node(from); node != kNone) index_.set_block(node, g, to);
        pool.replace(from, to);
        local_moves_.push_back({g, from, to});
        moved.emplace(entry_of(g, from), entry_of(g, to));
    }
    for (BlockTable* table : tables) {
        for (int32_t& entry : table->groups[g].entries)
            if (const auto found = moved.find(entry); found != moved.end()) entry = found->second;
    }
    if (division_.house()->owner(extent) == g) empty(g, extent);
}

}  // namespace swiftkv
