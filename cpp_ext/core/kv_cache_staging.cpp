// The part of the cache that sizes the layer-stream cache, where borrowed blocks are staged.
#include <algorithm>
#include <vector>

#include "../common/check.h"
#include "kv_cache.h"

namespace swiftkv {

// Returns the most borrowed blocks of a group that one sequence could stage if it were alone.
int KvCache::most_streamed(int g) const {
    return std::min(groups_[g].pool.num_held(), division_.staging_target(g) * groups_[g].spec.num_layers);
}

void KvCache::shrink_staging() {
    for (int g = 0; g < num_groups(); ++g) {
        KvGroup& group = groups_[g];
        // Blocks in recalled extents are moved and not staged, so `target` does not count them.
        const int target = division_.staging_target(g);
        while (static_cast<int>(group.staging.size()) > target) {
            group.pool.stop_staging(group.staging.back());
            group.staging.pop_back();
        }
    }
}

void KvCache::grow_staging() {
    if (is_draining()) return;
    for (int g; (g = division_.history_to_shrink()) != kNone;) empty_oldest(g);
    for (int g = 0; g < num_groups(); ++g)
        while (static_cast<int>(groups_[g].staging.size()) < division_.staging_target(g))
            if (!stage_more(g)) break;
}

bool KvCache::stage_more(int g) {
    return division_.is_shared() ? stage_extent(g) : stage_block(g);
}

// Adds a block to the group's part of the layer-stream cache; returns false if there is no room.
bool KvCache::stage_block(int g) {
    KvGroup& group = groups_[g];
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
        const int target = division_.staging_target(g), size = static_cast<int>(groups_[g].staging.size());
        if (size > target || (size < target && division_.can_stage_more(g))) return true;
    }
    return false;
}

int KvCache::num_staging_layer_blocks(int g) const {
    const KvGroup& group = groups_[g];
    return (static_cast<int>(group.staging.size()) - group.num_fresh) * group.spec.num_layers;
}

int32_t KvCache::staging_layer_block(int g, int index) const {
    const KvGroup& group = groups_[g];
    const int num_layers = group.spec.num_layers;
    const auto at = static_cast<size_t>(index / num_layers);
    ensure(at < group.staging.size(), "a block is staged in the layer-stream cache");
    return group.staging[at] * num_layers + index % num_layers;
}

// ---- extents that groups share ----

// Adds an extent to the group's part of the layer-stream cache; returns false if every extent has a block that must
// stay.
bool KvCache::stage_extent(int g) {
    KvGroup& group = groups_[g];
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
// If that was the group's own, its blocks move to peers: each layer is copied before the group writes there.
ExtentId KvCache::empty_for_staging(int g) {
    BlockPool& pool = groups_[g].pool;
    House& house = *division_.house();
    if (!division_.has_extent_for(g)) {
        const BlockId own = pool.last_of_oldest_open();
        const int donor = division_.cheapest_donor(g, std::vector<int>(groups_.size(), 0));
        if (own == kNone && donor == kNone) return kNone;
        const BlockId other = donor == kNone ? kNone : groups_[donor].pool.last_of_oldest_open();
        if (donor == kNone || (own != kNone && division_.goes_before({g, own}, {donor, other}))) {
            const ExtentId extent = pool.house_extent(own);
            const BlockId first = extent * pool.house_extent_blocks();
            for (BlockId b = first; b < first + pool.house_extent_blocks(); ++b)
                if (pool.state(b) == BlockState::kCached) demote(g, b);
            if (house.owner(extent) == g) return extent;
        } else {
            empty_oldest(donor);
        }
    }
    const ExtentId extent = house.take(g);
    pool.enter(extent);
    return extent;
}

}  // namespace swiftkv
