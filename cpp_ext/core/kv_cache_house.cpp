// The part of the cache that hands extents of the pool from one KV group to another, and to peers.
//
// `wanted` is, per group, the number of blocks that it is about to take and of those that must stay available beside
// them; 0 for a group that takes none.
#include <algorithm>
#include <climits>
#include <ranges>
#include <unordered_map>
#include <utility>

#include "../common/check.h"
#include "kv_cache.h"

namespace swiftkv {

std::vector<int> KvCache::missing_blocks(const BlockTable& table, int chunk_end, int prompt_end) const {
    std::vector<int> needed;
    for (int g = 0; g < num_groups(); ++g) needed.push_back(std::max(0, missing(table, g, chunk_end, prompt_end)));
    return needed;
}

// Returns the number of local blocks that a group wants if `staged` of the `needed` ones lie further down. Spare blocks
// that could be staged need not stay available here.
int KvCache::wanted_of(int g, int needed, int spare, int staged, Gain gain) const {
    const int over = overdraft(g, gain);
    if (needed == 0 && over == 0) return 0;
    return needed - staged + over + std::max(0, spare - (available_staged(g, gain) - staged));
}

// Returns the fewest local blocks that groups want: as many as possible lie further down.
std::vector<int> KvCache::wanted_blocks(const BlockTable& table, int chunk_end, int prompt_end, Spare spare) const {
    std::vector<int> wanted = missing_blocks(table, chunk_end, prompt_end);
    for (int g = 0; g < num_groups(); ++g)
        wanted[g] = wanted_of(g, wanted[g], spare.of(spec(g)), std::min(wanted[g], available_staged(g, {})), {});
    return wanted;
}

// Divides the needed blocks: as many as fit the pool are local, the others are staged.
Portions KvCache::portions(std::span<const int> needed, Spare spare) const {
    Portions found{{needed.begin(), needed.end()}, std::vector<int>(needed.size(), 0), {}};
    for (int g = 0; g < num_groups(); ++g) found.wanted.push_back(wanted_of(g, needed[g], spare.of(spec(g)), 0, {}));
    for (int g = 0; g < num_groups() && spare_extents(found.wanted, false) < 0; ++g) {
        const auto fits = [&](int staged) {
            found.wanted[g] = wanted_of(g, needed[g], spare.of(spec(g)), staged, {});
            return spare_extents(found.wanted, false) >= 0;
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

// Adds the needed blocks to a table. Takes those further down first: cached blocks that leave the pool would take them.
void KvCache::extend_in_house(BlockTable& table, std::span<const int> needed, Spare spare) {
    Portions taken = portions(needed, spare);
    const auto put = [&](int g, BlockId block) {
        ensure(block != kNone, "there are as many blocks as were counted");
        table.groups[g].entries.push_back(entry_of(g, block));
    };
    std::vector<std::vector<BlockId>> below(groups_.size());
    for (int g = 0; g < num_groups(); ++g)
        for (int i = 0; i < taken.staged[g]; ++i) below[g].push_back(take_below(g, Place::kLocal));
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

// Returns the number of extents that groups lack to have the wanted blocks available.
int KvCache::missing_extents(std::span<const int> wanted) const {
    int extents = 0;
    for (int g = 0; g < num_groups(); ++g) {
        const BlockPool& pool = groups_[g].pool;
        extents += ceil_div(std::max(0, wanted[g] - pool.available(Place::kLocal)), pool.house_extent_blocks());
    }
    return extents;
}

// Returns the number of extents that are left when every group has the wanted blocks; < 0: so many are missing. Groups
// with more blocks than they want give up open extents, or, if `is_compacted`, as many extents as their surplus fills.
int KvCache::spare_extents(std::span<const int> wanted, bool is_compacted) const {
    int extents = house_->num_free() - missing_extents(wanted);
    for (int g = 0; g < num_groups(); ++g) {
        const BlockPool& pool = groups_[g].pool;
        const int full = std::max(0, pool.available(Place::kLocal) - wanted[g]) / pool.house_extent_blocks();
        extents += is_compacted ? full : std::min(pool.num_open(), full);
    }
    return can_borrow() ? std::min(extents, spare_for_histories(wanted, is_compacted)) : extents;
}

// Whether free blocks and extents without an owner suffice, so that no block need be evicted.
bool KvCache::has_free_extents(std::span<const int> wanted) const {
    int extents = house_->num_free();
    for (int g = 0; g < num_groups(); ++g) {
        const BlockPool& pool = groups_[g].pool;
        const int lacking = std::max(0, wanted[g] - pool.num_free(Place::kLocal));
        extents -= ceil_div(lacking, pool.house_extent_blocks());
    }
    return extents >= 0 && (!can_borrow() || spare_for_histories(wanted, false) >= 0);
}

// Whether one cached block is evicted before another, whatever their groups. A full-attention block is worth as much as
// a tail: the least recently used of them goes first, with the blocks that are of no use without it.
bool KvCache::goes_before(int g, BlockId cached, int other_group, BlockId other) const {
    const auto rank = [&](int group, BlockId block) {
        return groups_[group].spec.window == 0 ? Worth::kKept : groups_[group].pool.worth(block);
    };
    if (rank(g, cached) != rank(other_group, other)) return rank(g, cached) < rank(other_group, other);
    return static_cast<int32_t>(groups_[g].pool.cached_at(cached) - groups_[other_group].pool.cached_at(other)) < 0;
}

// Returns another group that can give up an extent and still has the blocks that it wants; kNone if there is none.
// Among several, the group whose newest block in such an extent would be evicted first.
int KvCache::cheapest_donor(int g, std::span<const int> wanted) const {
    int cheapest = kNone;
    BlockId last_of_cheapest = kNone;
    for (int h = 0; h < num_groups(); ++h) {
        const BlockPool& pool = groups_[h].pool;
        if (h == g || pool.available(Place::kLocal) - wanted[h] < pool.house_extent_blocks()) continue;
        if (!may_take_from(g, h)) continue;
        const BlockId last = pool.last_of_oldest_open();
        if (last == kNone || (cheapest != kNone && goes_before(cheapest, last_of_cheapest, h, last))) continue;
        cheapest = h;
        last_of_cheapest = last;
    }
    return cheapest;
}

// Gives every group the extents that it lacks to have the needed blocks. This comes before any block is taken, because
// a taken block may keep its extent from changing hands.
void KvCache::enter_missing(std::span<const int> needed, std::span<const int> wanted) {
    for (int g = 0; g < num_groups();) {
        if (groups_[g].pool.available(Place::kLocal) >= needed[g]) {
            ++g;
            continue;
        }
        if (house_->num_free() == 0 || !may_grow(g)) {
            const int donor = cheapest_donor(g, wanted);
            ensure(donor != kNone, "there are as many extents as were counted");
            empty_oldest(donor);
        }
        groups_[g].pool.enter(house_->take(g));
        g = 0;  // other groups may have lost blocks, and extents, together with an evicted full-attention block
    }
}

// Makes sure that the group has a free local block, or returns the group's block that must be evicted for it. A group
// that can evict a block of its own takes no extent that another group lacks.
BlockId KvCache::find_free(int g, std::span<const int> wanted) {
    BlockPool& pool = groups_[g].pool;
    if (pool.num_free(Place::kLocal) > 0) return kNone;
    const BlockId own = pool.oldest_cached(Place::kLocal);
    if (house_->num_free() <= (own == kNone ? 0 : missing_extents(wanted)) || !may_grow(g)) {
        ensure(own != kNone, "there is as much room as was counted");
        const int donor = cheapest_donor(g, wanted);
        if (donor == kNone || !goes_before(donor, groups_[donor].pool.last_of_oldest_open(), g, own)) return own;
        empty_oldest(donor);
    }
    enter_if_full(g);
    return kNone;
}

// Takes an extent if no block is free: the evicted block may have been the last of its extent, which then went back to
// the house.
void KvCache::enter_if_full(int g) {
    BlockPool& pool = groups_[g].pool;
    if (pool.num_free(Place::kLocal) == 0) pool.enter(house_->take(g));
}

// Frees a local block without a copy, as no step is being planned.
void KvCache::free_one(int g, std::span<const int> wanted) {
    if (const BlockId own = find_free(g, wanted); own != kNone) evict(g, own);
    enter_if_full(g);
}

// Frees a local block; returns false if that is impossible. Other groups keep the blocks that they need.
bool KvCache::make_room_in_house(int g) {
    std::vector<int> wanted, needed(groups_.size(), 0);
    for (int h = 0; h < num_groups(); ++h) wanted.push_back(overdraft(h));
    wanted[g] = std::max(wanted[g], 1);
    needed[g] = 1;
    if (spare_extents(wanted, false) < 0) return false;
    enter_missing(needed, wanted);
    if (const BlockId own = find_free(g, wanted); own != kNone) demote(g, own);
    enter_if_full(g);
    return true;
}

// Whether a borrowed block in use may be promoted: that must not take extents from other groups.
bool KvCache::may_promote(int g, int spare) const {
    const BlockPool& pool = groups_[g].pool;
    const int free = house_ && may_grow(g) ? house_->num_free() * pool.house_extent_blocks() : 0;
    return pool.available(Place::kLocal) + free > spare;
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
    ensure(house_->owner(extent) == kNone, "an extent that is emptied has no owner");
}

// ---- lending ----

// Returns the cached block of consecutive extents that is evicted last; kNone if none is cached there, nullopt if a
// block there is neither cached nor free.
std::optional<KvCache::Cached> KvCache::last_to_go(ExtentId first, int num_extents) const {
    Cached last{kNone, kNone};
    for (ExtentId extent = first; extent < first + num_extents; ++extent) {
        const int g = house_->owner(extent);
        if (g == kNone) continue;
        const BlockPool& pool = groups_[g].pool;
        if (!pool.is_open(extent)) return std::nullopt;
        const BlockId begin = extent * pool.house_extent_blocks();
        for (BlockId b = begin; b < begin + pool.house_extent_blocks(); ++b) {
            if (pool.state(b) != BlockState::kCached) continue;
            if (last.group == kNone || goes_before(last.group, last.block, g, b)) last = {g, b};
        }
    }
    return last;
}

// Returns up to `max_extents` of a link that could be lent: extents without an owner, highest first; then, if
// `or_cached`, those of any group that hold only free and cached blocks, in the order in which these are evicted.
std::vector<int> KvCache::lendable_of_house(int lend_link, int max_extents, bool or_cached) const {
    const auto [g, link] = lend_links_[lend_link];
    const BlockPool& pool = groups_[g].pool;
    const int size = pool.blocks_per_extent(link) / pool.house_extent_blocks();
    const auto has_owner = [&](ExtentId extent) { return house_->owner(extent) != kNone; };
    std::vector<int> found;
    for (int extent = pool.num_lend_extents(link); extent-- > 0 && static_cast<int>(found.size()) < max_extents;)
        if (std::ranges::none_of(std::views::iota(extent * size, (extent + 1) * size), has_owner))
            found.push_back(extent);
    if (!or_cached || static_cast<int>(found.size()) == max_extents) return found;
    std::vector<std::pair<Cached, int>> others;
    for (int extent = 0; extent < pool.num_lend_extents(link); ++extent) {
        const std::optional<Cached> last = last_to_go(extent * size, size);
        if (last && last->group != kNone) others.emplace_back(*last, extent);
    }
    const auto num_wanted = std::min<std::ptrdiff_t>(max_extents - std::ssize(found), std::ssize(others));
    std::partial_sort(others.begin(), others.begin() + num_wanted, others.end(), [&](const auto& a, const auto& b) {
        return goes_before(a.first.group, a.first.block, b.first.group, b.first.block);
    });
    for (const auto& [last, extent] : std::span(others).first(num_wanted)) found.push_back(extent);
    return found;
}

// Empties the extents of these blocks, which nothing pins, and gives them to the group.
void KvCache::claim(int g, BlockId first, int num_blocks) {
    const int size = groups_[g].pool.house_extent_blocks();
    for (ExtentId extent = first / size; extent < (first + num_blocks) / size; ++extent) {
        if (const int owner = house_->owner(extent); owner != kNone) empty(owner, extent);
        house_->take(g, extent);
        groups_[g].pool.enter(extent);
    }
}

// ---- compaction ----

bool KvCache::compact(const BlockTable& table, int chunk_end, int prompt_end, int spare,
                      std::span<BlockTable* const> tables) {
    // Moves come before copies, and a block that is copied may be free already: who took its place may be preempted.
    if (!house_ || has_copies()) return false;
    const std::vector<int> wanted = wanted_blocks(table, chunk_end, prompt_end, {spare});
    if (spare_extents(wanted, true) < 0 || spare_extents(wanted, false) >= 0) return false;
    while (spare_extents(wanted, false) < 0) {
        const auto [g, extent] = extent_to_compact(wanted);
        if (g == kNone) return false;
        move_out(g, extent, tables);
    }
    return true;
}

// Returns the extent with the fewest used blocks, and its group, which must be able to give up more blocks than its
// open extents hold; kNone if there is none. Blocks that are in flight, loading, staging or just moved must stay in
// place.
std::pair<int, ExtentId> KvCache::extent_to_compact(std::span<const int> wanted) const {
    std::pair<int, ExtentId> found{kNone, kNone};
    int fewest = INT_MAX;
    for (int g = 0; g < num_groups(); ++g) {
        const BlockPool& pool = groups_[g].pool;
        const int left = pool.available(Place::kLocal) - wanted[g], size = pool.house_extent_blocks();
        if (left / size <= pool.num_open()) continue;
        for (ExtentId extent = 0; extent < house_->num_extents(); ++extent) {
            if (house_->owner(extent) != g) continue;
            const int num_used = pool.num_used_alone(extent);
            if (num_used == 0 || num_used >= fewest) continue;
            fewest = num_used;
            found = {g, extent};
        }
    }
    return found;
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
    if (house_->owner(extent) == g) empty(g, extent);
}

}  // namespace swiftkv
