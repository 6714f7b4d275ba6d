// The part of the cache that stages borrowed blocks: the layer-stream cache, and the room that it leaves.
//
// A *history* is the blocks of a sequence in the full-attention groups. They grow with the sequence; those of its
// sliding windows do not.
#include <algorithm>
#include <climits>
#include <utility>
#include <vector>

#include "../common/check.h"
#include "kv_cache.h"

namespace swiftkv {

// ---- layer-stream cache ----

int KvCache::num_home_blocks(int g) const {
    // If groups share extents, the first group lends for all of them, and each group lacks the lent extents.
    const Group& lender = groups_[house_ ? 0 : g];
    const int num_home = lender.spec.num_blocks - lender.pool.count(Place::kLocal, BlockState::kLent);
    return house_ ? num_home / lender.spec.blocks_per_extent * groups_[g].spec.blocks_per_extent : num_home;
}

// Returns the most blocks of a group that one sequence could have now if it were alone.
int KvCache::most_of_one_sequence(int g) const {
    const Group& group = groups_[g];
    const int streamed = std::min(group.pool.num_held(), staging_target(g) * group.spec.num_layers);
    return num_home_blocks(g) - staging_target(g) + streamed;
}

int KvCache::staging_target(int g) const {
    const BlockPool& pool = groups_[g].pool;
    if (house_) {
        // Keeps room for the used blocks that are staged, even if fewer blocks are borrowed now.
        const int size = pool.house_extent_blocks();
        const int used = ceil_div(pool.count_staged(BlockState::kUsed), size * groups_[g].spec.num_layers);
        return std::max(staging_extents_of(g), std::min(used, static_cast<int>(groups_[g].staging.size()) / size)) *
               size;
    }
    const int own = pool.num_local() - pool.count(Place::kLocal, BlockState::kLent);
    return std::min(own, ceil_div(pool.num_held(), groups_[g].spec.num_layers));
}

void KvCache::shrink_staging() {
    for (int g = 0; g < num_groups(); ++g) {
        Group& group = groups_[g];
        // Blocks in recalled extents are moved and not staged, so `target` does not count them.
        const int target = staging_target(g);
        while (static_cast<int>(group.staging.size()) > target) {
            group.pool.stop_staging(group.staging.back());
            group.staging.pop_back();
        }
    }
}

void KvCache::grow_staging() {
    if (is_draining()) return;
    if (house_ && can_borrow()) make_room_for_windows();
    for (int g = 0; g < num_groups(); ++g)
        while (static_cast<int>(groups_[g].staging.size()) < staging_target(g))
            if (!(house_ ? stage_extent(g) : stage_block(g))) break;
}

// Adds a block to the group's part of the layer-stream cache; returns false if there is no room.
bool KvCache::stage_block(int g) {
    Group& group = groups_[g];
    const size_t num_spills = group.spills.size();
    if (!make_local_room(g)) return false;
    // Its layer blocks will serve all layers, so it must not be used before its own last layer is spilled.
    if (group.spills.size() > num_spills) ++group.num_fresh;
    const BlockId block = group.pool.start_staging();
    ensure(block != kNone, "a block is free after room was made for it");
    group.staging.push_back(block);
    return true;
}

bool KvCache::must_resize_staging() const {
    for (int g = 0; g < num_groups(); ++g) {
        const int target = staging_target(g), size = static_cast<int>(groups_[g].staging.size());
        if (size > target || (size < target && can_stage_more(g))) return true;
    }
    return false;
}

int KvCache::num_staging_layer_blocks(int g) const {
    const Group& group = groups_[g];
    return (static_cast<int>(group.staging.size()) - group.num_fresh) * group.spec.num_layers;
}

int32_t KvCache::staging_layer_block(int g, int index) const {
    const Group& group = groups_[g];
    const int num_layers = group.spec.num_layers;
    const auto at = static_cast<size_t>(index / num_layers);
    ensure(at < group.staging.size(), "a block is staged in the layer-stream cache");
    return group.staging[at] * num_layers + index % num_layers;
}

// ---- extents that groups share ----

// Returns the number of extents that stage a group's blocks. A whole extent stages blocks of one group, because no
// group could own an extent with layer blocks of several.
int KvCache::staging_extents_of(int group) const {
    int left = std::max(0, num_home_extents() - extents_for_windows_);
    for (int g = 0; g < group; ++g) left -= staging_extents(spec(g), groups_[g].pool.num_held(), left);
    return staging_extents(spec(group), groups_[group].pool.num_held(), left);
}

bool KvCache::could_hold_in_house(std::span<const int> num_blocks) const {
    std::vector<int> local;
    for (int g = 0; g < num_groups(); ++g) {
        const int num_staged = std::min(groups_[g].pool.num_held(), staging_target(g) * spec(g).num_layers);
        local.push_back(std::max(0, num_blocks[g] - num_staged));
    }
    return fits_house(local);
}

// Whether so many blocks of each group fit beside the layer-stream cache if nothing else has extents.
bool KvCache::fits_house(std::span<const int> num_blocks) const {
    int of_histories = 0, of_windows = 0;
    for (int g = 0; g < num_groups(); ++g)
        (spec(g).window > 0 ? of_windows : of_histories) += staging_extents_of(g) + extents_for(spec(g), num_blocks[g]);
    return of_histories + std::max(of_windows, borrows() ? extents_for_windows_ : 0) <= num_home_extents();
}

bool KvCache::can_stage_more(int g) const {
    if (!house_) return groups_[g].pool.available(Place::kLocal) > 0;
    if (house_->num_free() > 0 && may_grow(g)) return true;
    for (int h = 0; h < num_groups(); ++h)
        if (groups_[h].pool.num_open() > 0 && may_take_from(g, h)) return true;
    return false;
}

// Takes back from histories the extents that are kept for windows, as far as nothing pins them.
void KvCache::make_room_for_windows() {
    while (num_left_for_histories() < 0) {
        int oldest = kNone;
        for (int g = 0; g < num_groups(); ++g) {
            const BlockPool& pool = groups_[g].pool;
            if (groups_[g].spec.window > 0 || pool.num_open() == 0) continue;
            const BlockId last = pool.last_of_oldest_open();
            if (oldest == kNone || goes_before(g, last, oldest, groups_[oldest].pool.last_of_oldest_open())) oldest = g;
        }
        if (oldest == kNone) return;
        empty_oldest(oldest);
    }
}

// Adds an extent to the group's part of the layer-stream cache; returns false if every extent has a block that must
// stay.
bool KvCache::stage_extent(int g) {
    Group& group = groups_[g];
    const size_t num_spills = group.spills.size();
    const ExtentId extent = empty_for_staging(g);
    if (extent == kNone) return false;
    const int size = group.pool.house_extent_blocks();
    // The layer-stream cache is used from its front, so no block can be used before the blocks in front of it.
    if (group.spills.size() > num_spills || group.num_fresh > 0) group.num_fresh += size;
    for (BlockId b = extent * size; b < (extent + 1) * size; ++b) {
        group.pool.start_staging(b);
        group.staging.push_back(b);
    }
    return true;
}

// Returns an extent of the group whose blocks are all free: one that had no owner, or the extent that is worth least.
// If that was the group's own, its blocks move further down: each layer is copied before the group writes there.
ExtentId KvCache::empty_for_staging(int g) {
    BlockPool& pool = groups_[g].pool;
    if (house_->num_free() == 0 || !may_grow(g)) {
        const BlockId own = pool.last_of_oldest_open();
        const int donor = cheapest_donor(g, std::vector<int>(groups_.size(), 0));
        if (own == kNone && donor == kNone) return kNone;
        const BlockId other = donor == kNone ? kNone : groups_[donor].pool.last_of_oldest_open();
        if (donor == kNone || (own != kNone && goes_before(g, own, donor, other))) {
            const ExtentId extent = pool.house_extent(own);
            const BlockId first = extent * pool.house_extent_blocks();
            for (BlockId b = first; b < first + pool.house_extent_blocks(); ++b)
                if (pool.state(b) == BlockState::kCached) demote(g, b);
            if (house_->owner(extent) == g) return extent;
        } else {
            empty_oldest(donor);
        }
    }
    const ExtentId extent = house_->take(g);
    pool.enter(extent);
    return extent;
}

// Does what spare_extents() does for the extents that histories may have; returns INT_MAX if histories lack none.
int KvCache::spare_for_histories(std::span<const int> wanted, bool is_compacted) const {
    int extents = num_left_for_histories(), missing = 0;
    for (int g = 0; g < num_groups(); ++g) {
        if (groups_[g].spec.window > 0) continue;
        const BlockPool& pool = groups_[g].pool;
        const int size = pool.house_extent_blocks(), left = pool.available(Place::kLocal) - wanted[g];
        missing += ceil_div(std::max(0, -left), size);
        extents += is_compacted ? std::max(0, left) / size : std::min(pool.num_open(), std::max(0, left) / size);
    }
    return missing == 0 ? INT_MAX : extents - missing;
}

// Returns the number of extents that histories may still take. While anything is borrowed, room for the windows of one
// sequence is kept from them: otherwise a sequence whose history lies here, and not with lenders, could not go on.
int KvCache::num_left_for_histories() const {
    int left = num_home_extents() - (borrows() ? extents_for_windows_ : 0);
    for (int g = 0; g < num_groups(); ++g) {
        const BlockPool& pool = groups_[g].pool;
        const int held = pool.num_local() - pool.count(Place::kLocal, BlockState::kAbsent) -
                         pool.count(Place::kLocal, BlockState::kLent);
        if (groups_[g].spec.window == 0) left -= held / pool.house_extent_blocks();
    }
    return left;
}

bool KvCache::borrows() const {
    return std::any_of(groups_.begin(), groups_.end(), [](const Group& group) { return group.pool.num_held() > 0; });
}

bool KvCache::may_grow(int g) const {
    return !can_borrow() || groups_[g].spec.window > 0 || num_left_for_histories() > 0;
}

// Returns the number of extents without an owner that the group may take.
int KvCache::num_extents_to_take(int g) const {
    const int num_free = house_->num_free();
    if (!can_borrow() || groups_[g].spec.window > 0) return num_free;
    return std::clamp(num_left_for_histories(), 0, num_free);
}

// Whether the group may take an extent from another one.
bool KvCache::may_take_from(int g, int other) const {
    return g == other || groups_[other].spec.window == 0 || may_grow(g);
}

}  // namespace swiftkv
