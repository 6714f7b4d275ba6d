// The part of the cache that follows leases: the layer-stream cache, and extents that come and go.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../common/check.h"
#include "kv_cache.h"

namespace swiftkv {

// ---- layer-stream cache ----

int KvCache::num_home_blocks(int g) const {
    // Groups that share extents lend in the name of the first, and all of them lack what is lent.
    const Group& lender = groups_[house_ ? 0 : g];
    const int num_home = lender.spec.num_blocks - lender.pool.count(Place::kLocal, BlockState::kLent);
    return house_ ? num_home / lender.spec.blocks_per_extent * groups_[g].spec.blocks_per_extent : num_home;
}

// The most blocks of a group that a sequence could have now if it were alone.
int KvCache::most_of_one_sequence(int g) const {
    const Group& group = groups_[g];
    const int streamed = std::min(group.pool.num_held(), staging_target(g) * group.spec.num_layers);
    return num_home_blocks(g) - staging_target(g) + streamed;
}

int KvCache::staging_target(int g) const {
    const BlockPool& pool = groups_[g].pool;
    const int own = pool.num_local() - pool.count(Place::kLocal, BlockState::kLent);
    return std::min(own, ceil_div(pool.num_held(), groups_[g].spec.num_layers));
}

void KvCache::shrink_staging() {
    for (int g = 0; g < num_groups(); ++g) {
        Group& group = groups_[g];
        // `target` layer blocks stage all blocks that are held. Those that are leaving move, and are not staged.
        const int target = staging_target(g);
        while (static_cast<int>(group.staging.size()) > target) {
            group.pool.stop_staging(group.staging.back());
            group.staging.pop_back();
        }
    }
}

void KvCache::grow_staging() {
    if (is_draining()) return;
    for (int g = 0; g < num_groups(); ++g) {
        Group& group = groups_[g];
        const int target = staging_target(g);
        while (static_cast<int>(group.staging.size()) < target) {
            const size_t num_spills = group.spills.size();
            if (!make_local_room(g)) break;
            // Its layer blocks serve all layers, so they must not be written before the last layer is spilled.
            if (group.spills.size() > num_spills) ++group.num_fresh;
            const BlockId block = group.pool.start_staging();
            ensure(block != kNone, "there is room where room was made");
            group.staging.push_back(block);
        }
    }
}

bool KvCache::must_resize_staging() const {
    for (int g = 0; g < num_groups(); ++g) {
        const int target = staging_target(g), size = static_cast<int>(groups_[g].staging.size());
        if (size > target || (size < target && groups_[g].pool.available(Place::kLocal) > 0)) return true;
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
    ensure(at < group.staging.size(), "what is staged in is of the layer-stream cache");
    return group.staging[at] * num_layers + index % num_layers;
}

// ---- lending and borrowing ----

const KvCache::LinkOfGroup& KvCache::find_link(const std::vector<LinkOfGroup>& links, int link, const char* kind) {
    if (link < 0 || link >= static_cast<int>(links.size()))
        throw std::invalid_argument("link: there are " + std::to_string(links.size()) + " " + kind +
                                    " links, and none has the number " + std::to_string(link));
    return links[link];
}

std::vector<int> KvCache::lend(int lend_link, int max_extents, bool or_cached) {
    const auto [g, link] = find_link(lend_links_, lend_link, "lend");
    BlockPool& pool = groups_[g].pool;
    if (max_extents < 0) throw std::invalid_argument("max_extents must not be negative");
    const std::vector<int> extents =
        house_ ? lendable_of_house(lend_link, max_extents, or_cached) : pool.lendable(link, max_extents, or_cached);
    for (int extent : extents) {
        const BlockId first = pool.first_block(link, extent);
        if (house_) claim(g, first, pool.blocks_per_extent(link));
        for (BlockId b = first; b < first + pool.blocks_per_extent(link); ++b)
            if (pool.state(b) == BlockState::kCached) evict(g, b);
        pool.lend(link, extent);
    }
    return extents;
}

void KvCache::take_back(int lend_link, std::span<const int32_t> extents) {
    const auto [g, link] = find_link(lend_links_, lend_link, "lend");
    BlockPool& pool = groups_[g].pool;
    pool.check_lent(link, extents);
    for (int extent : extents) pool.take_back(link, extent);
}

void KvCache::borrow(int borrow_link, std::span<const int32_t> extents) {
    const auto [g, link] = find_link(borrow_links_, borrow_link, "borrow");
    BlockPool& pool = groups_[g].pool;
    pool.check_not_held(link, extents);
    for (int extent : extents) pool.borrow(link, extent);
}

void KvCache::recall(int borrow_link, std::span<const int32_t> extents) {
    const auto [g, link] = find_link(borrow_links_, borrow_link, "borrow");
    BlockPool& pool = groups_[g].pool;
    pool.check_held(link, extents);
    for (int extent : extents) pool.recall(link, extent);
}

std::vector<int> KvCache::take_returned(int borrow_link) {
    const auto [g, link] = find_link(borrow_links_, borrow_link, "borrow");
    return groups_[g].pool.take_returned(link);
}

void KvCache::lose(int borrow_link) {
    lose_link(find_link(borrow_links_, borrow_link, "borrow"));
}

void KvCache::lose_link(LinkOfGroup lost) noexcept {
    const auto [g, link] = lost;
    BlockPool& pool = groups_[g].pool;
    std::vector<BlockId> indexed;
    pool.for_each_of_link(link, [&, g = g](BlockId block) {
        if (groups_[g].pool.node(block) != kNone) indexed.push_back(block);
    });
    for (BlockId block : indexed)
        if (pool.node(block) != kNone) evict(g, block);
    pool.lose(link);

    std::vector<BlockId>& missing = groups_[g].missing;
    for (const BlockCopy& copy : groups_[g].moves_in)
        if (pool.is_lost(copy.borrowed)) missing.push_back(copy.local);
    for (const BlockMove& move : groups_[g].moves_across)
        if (pool.is_lost(move.from)) missing.push_back(move.to);
    for (BlockId block : missing)
        if (pool.node(block) != kNone) evict(g, block);
}

bool KvCache::is_draining() const {
    return std::any_of(groups_.begin(), groups_.end(), [](const Group& group) { return group.pool.is_draining(); });
}

std::vector<BlockId> KvCache::leaving(int g, BlockState state) const {
    const BlockPool& pool = groups_[g].pool;
    std::vector<BlockId> found;
    if (pool.is_draining()) {
        pool.for_each_leaving([&](BlockId block) {
            if (pool.state(block) == state) found.push_back(block);
        });
    }
    return found;
}

bool KvCache::drain(std::span<BlockTable* const> tables) {
    std::vector<std::vector<BlockId>> used;
    for (int g = 0; g < num_groups(); ++g) {
        const BlockPool& pool = groups_[g].pool;
        used.push_back(leaving(g, BlockState::kUsed));
        const int num_used = static_cast<int>(used[g].size());
        const int elsewhere = std::min(num_unstaged(g) + num_used, pool.available_below(Place::kLocal));
        if (num_used > pool.available(Place::kLocal) + elsewhere) return false;
    }
    for (int g = 0; g < num_groups(); ++g) {
        drain_cached(g, leaving(g, BlockState::kLeaving), static_cast<int>(used[g].size()));
        drain_used(g, used[g], tables);
    }
    return true;
}

// Moves cached blocks to free local ones, as far as the used ones leave any; the others are forgotten.
void KvCache::drain_cached(int g, const std::vector<BlockId>& leaving, int num_used) {
    const BlockPool& pool = groups_[g].pool;
    for (BlockId block : leaving) {
        if (pool.state(block) != BlockState::kLeaving) continue;  // gone with the node of another group
        const bool has_room = pool.num_free(Place::kLocal) > num_used;
        if (!has_room || move_in(g, block) == kNone) evict(g, block);
    }
}

// Moves used blocks to the local pool as far as there is room, else to extents that stay: these first, because room in
// the local pool is made by moving what is cached there to just such extents.
void KvCache::drain_used(int g, const std::vector<BlockId>& used, std::span<BlockTable* const> tables) {
    if (used.empty()) return;
    const int num_across = std::max(0, static_cast<int>(used.size()) - groups_[g].pool.available(Place::kLocal));
    std::unordered_map<int32_t, int32_t> moved;  // by entry
    for (int i = 0; i < static_cast<int>(used.size()); ++i) {
        const BlockId to = i < num_across ? move_across(g, used[i]) : move_in(g, used[i]);
        ensure(to != kNone, "there is as much room for what drains as was counted");
        moved.emplace(staged(used[i]), entry_of(g, to));
    }
    for (BlockTable* table : tables) {
        for (int32_t& entry : table->groups[g].entries) {
            if (!is_staged(entry)) continue;
            if (const auto found = moved.find(entry); found != moved.end()) entry = found->second;
        }
    }
}

// A used block moves from one extent to another: through the layer-stream cache, as if the step had written it.
BlockId KvCache::move_across(int g, BlockId block) {
    Group& group = groups_[g];
    const BlockId to = take_below(g, Place::kLocal);
    if (to == kNone) return kNone;
    if (const NodeId node = group.pool.node(block); node != kNone) point_to(node, g, to);
    group.pool.replace(block, to);
    group.moves_across.push_back({block, to});
    return to;
}

void KvCache::forget_idle_moves() {
    for (int g = 0; g < num_groups(); ++g) {
        std::erase_if(groups_[g].moves_across, [&](const BlockMove& move) {
            if (groups_[g].pool.refs(move.to) > 0) return false;
            if (groups_[g].pool.node(move.to) != kNone) evict(g, move.to);
            return true;
        });
    }
}

bool KvCache::is_lost(int g, BlockId block) const {
    const std::vector<BlockId>& missing = groups_[g].missing;
    return groups_[g].pool.is_lost(block) || std::find(missing.begin(), missing.end(), block) != missing.end();
}

bool KvCache::holds_lost(const BlockTable& table) const {
    for (int g = 0; g < num_groups(); ++g) {
        const std::vector<int32_t>& entries = table.groups[g].entries;
        if (std::any_of(entries.begin(), entries.end(),
                        [&](int32_t entry) { return entry != kNoBlock && is_lost(g, block_of(g, entry)); }))
            return true;
    }
    return false;
}

std::vector<std::pair<int, BlockId>> KvCache::arrivals(const BlockTable& table, int num_blocks) const {
    std::vector<std::pair<int, BlockId>> arrivals;
    for (int g = 0; g < num_groups(); ++g) {
        const Group& group = groups_[g];
        if (group.moves_in.empty() && group.pool.count_staged(BlockState::kUsed) == 0) continue;
        for (int i = table.groups[g].first; i < num_blocks; ++i) {
            const BlockId block = block_of(g, table.groups[g].entries[i]);
            if (!is_local(g, block) || group.pool.is_moving(block)) arrivals.emplace_back(g, block);
        }
    }
    return arrivals;
}

BlockPool::Location KvCache::locate(int g, BlockId borrowed) const {
    const Group& group = groups_[g];
    const int64_t block_bytes = group.spec.layer_block_bytes * group.spec.num_layers;
    BlockPool::Location location = group.pool.locate(borrowed, block_bytes);
    location.link = group.borrow_links[location.link];
    return location;
}

bool KvCache::has_copies() const {
    return std::any_of(groups_.begin(), groups_.end(), [](const Group& group) {
        return !group.spills.empty() || !group.moves_in.empty() || !group.moves_across.empty();
    });
}

}  // namespace swiftkv
