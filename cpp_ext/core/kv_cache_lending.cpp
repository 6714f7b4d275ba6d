// What of the cache follows leases: the layer-stream cache, and extents that come and go.
#include <algorithm>
#include <vector>

#include "kv_cache.h"

namespace swiftkv {

// ---- layer-stream cache ----

bool KvCache::could_hold(int g, int num_blocks) const {
    const Group& group = groups_[g];
    const int regular = group.spec.num_blocks - group.pool.count(Place::kLocal, BlockState::kLent) - stream_target(g);
    const int streamed = std::min(group.pool.num_held(), stream_target(g) * group.spec.num_layers);
    return num_blocks <= regular + streamed;
}

int KvCache::stream_target(int g) const {
    const BlockPool& pool = groups_[g].pool;
    const int own = pool.num_local() - pool.count(Place::kLocal, BlockState::kLent);
    return std::min(own, ceil_div(pool.num_held(), groups_[g].spec.num_layers));
}

void KvCache::resize_stream() {
    for (int g = 0; g < num_groups(); ++g) {
        Group& group = groups_[g];
        const int target = stream_target(g);
        const int used = group.pool.count(Place::kBorrowed, BlockState::kUsed) - group.pool.count_used_leaving();
        while (static_cast<int>(group.streaming.size()) > target &&
               (static_cast<int>(group.streaming.size()) - 1) * group.spec.num_layers >= used) {
            group.pool.stop_streaming(group.streaming.back());
            group.streaming.pop_back();
        }
        while (static_cast<int>(group.streaming.size()) < target && group.pool.available(Place::kLocal) > 0) {
            if (group.pool.num_free(Place::kLocal) == 0) {
                const size_t num_spills = group.spills.size();
                clear_local(g, group.pool.oldest_cached(Place::kLocal));
                // Slots serve all layers, so they must not be written before the last layer is spilled.
                if (group.spills.size() > num_spills) ++group.num_fresh;
            }
            group.streaming.push_back(group.pool.highest_free_local());
            group.pool.start_streaming(group.streaming.back());
        }
    }
}

int KvCache::stream_slots(int g) const {
    const Group& group = groups_[g];
    return (static_cast<int>(group.streaming.size()) - group.num_fresh) * group.spec.num_layers;
}

int32_t KvCache::stream_slot(int g, int index) const {
    const int num_layers = groups_[g].spec.num_layers;
    return groups_[g].streaming[index / num_layers] * num_layers + index % num_layers;
}

// ---- lending and borrowing ----

std::vector<int> KvCache::lend(int lend_link, int max_extents, bool or_cached) {
    const auto [g, link] = lend_links_[lend_link];
    BlockPool& pool = groups_[g].pool;
    const std::vector<int> extents = pool.lendable(link, max_extents, or_cached);
    for (int extent : extents) {
        const BlockId first = pool.first_block(link, extent);
        for (BlockId b = first; b < first + pool.blocks_per_extent(link); ++b)
            if (pool.state(b) == BlockState::kCached) evict(g, b);
        pool.lend(link, extent);
    }
    return extents;
}

void KvCache::take_back(int lend_link, std::span<const int32_t> extents) {
    const auto [g, link] = lend_links_[lend_link];
    for (int extent : extents) groups_[g].pool.take_back(link, extent);
}

void KvCache::borrow(int borrow_link, std::span<const int32_t> extents) {
    const auto [g, link] = borrow_links_[borrow_link];
    for (int extent : extents) groups_[g].pool.borrow(link, extent);
}

void KvCache::recall(int borrow_link, std::span<const int32_t> extents) {
    const auto [g, link] = borrow_links_[borrow_link];
    for (int extent : extents) groups_[g].pool.recall(link, extent);
}

std::vector<int> KvCache::take_returned(int borrow_link) {
    const auto [g, link] = borrow_links_[borrow_link];
    return groups_[g].pool.take_returned(link);
}

void KvCache::lose(int borrow_link) {
    const auto [g, link] = borrow_links_[borrow_link];
    BlockPool& pool = groups_[g].pool;
    std::vector<BlockId> in_tree;
    pool.for_each_of_link(link, [&, g = g](BlockId block) {
        if (groups_[g].pool.node(block) != kNone) in_tree.push_back(block);
    });
    for (BlockId block : in_tree)
        if (pool.node(block) != kNone) evict(g, block);
    pool.lose(link);
}

bool KvCache::is_draining() const {
    return std::any_of(groups_.begin(), groups_.end(), [](const Group& group) { return group.pool.is_draining(); });
}

bool KvCache::drain(std::span<BlockTable* const> tables) {
    std::vector<std::vector<BlockId>> used(groups_.size()), cached(groups_.size());
    for (int g = 0; g < num_groups(); ++g) {
        const BlockPool& pool = groups_[g].pool;
        pool.for_each_leaving([&](BlockId block) {
            if (pool.state(block) == BlockState::kUsed) used[g].push_back(block);
            if (pool.state(block) == BlockState::kCached) cached[g].push_back(block);
        });
        if (static_cast<int>(used[g].size()) > pool.available(Place::kLocal)) return false;
    }
    for (int g = 0; g < num_groups(); ++g) {
        BlockPool& pool = groups_[g].pool;
        // Before anything is evicted to make room, which must not pick one of these.
        for (BlockId block : cached[g]) {
            if (pool.state(block) != BlockState::kCached) continue;  // gone with the node of another group
            if (pool.num_free(Place::kLocal) > static_cast<int>(used[g].size())) {
                move_in(g, block);
            } else {
                evict(g, block);
            }
        }
        for (BlockId block : used[g]) {
            const BlockId to = move_in(g, block);
            for (BlockTable* table : tables)
                std::replace(table->groups[g].entries.begin(), table->groups[g].entries.end(), ~block, entry_of(g, to));
        }
    }
    return true;
}

bool KvCache::holds_lost(const BlockTable& table) const {
    for (int g = 0; g < num_groups(); ++g) {
        const std::vector<int32_t>& entries = table.groups[g].entries;
        if (std::any_of(entries.begin(), entries.end(),
                        [&](int32_t entry) { return is_borrowed(entry) && groups_[g].pool.is_lost(~entry); }))
            return true;
    }
    return false;
}

BlockPool::Location KvCache::locate(int g, BlockId borrowed) const {
    const Group& group = groups_[g];
    const int64_t block_bytes = group.spec.layer_block_bytes * group.spec.num_layers;
    BlockPool::Location location = group.pool.locate(borrowed, block_bytes);
    location.link = group.borrow_links[location.link];
    return location;
}

bool KvCache::has_copies() const {
    return std::any_of(groups_.begin(), groups_.end(),
                       [](const Group& group) { return !group.spills.empty() || !group.moves_in.empty(); });
}

}  // namespace swiftkv
