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
    const std::vector<int> extents = division_.lendable(g, link, max_extents, or_cached);
    for (int extent : extents) {
        const BlockId first = pool.first_block(link, extent);
        claim(g, first, pool.blocks_per_extent(link));
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
    std::sort(missing.begin(), missing.end());
    for (BlockId block : missing)
        if (pool.node(block) != kNone) evict(g, block);
}

bool KvCache::is_draining() const {
    return std::any_of(groups_.begin(), groups_.end(), [](const KvGroup& group) { return group.pool.is_draining(); });
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
    for (int g = 0; g < num_groups(); ++g) used.push_back(leaving(g, BlockState::kUsed));
    const std::optional<Portions> room = portions_of_drain(used);
    if (!room) return false;
    enter_missing(room->local, room->wanted);
    for (int g = 0; g < num_groups(); ++g) {
        drain_cached(g, leaving(g, BlockState::kLeaving), room->local[g]);
        drain_used(g, used[g], room->staged[g], tables);
    }
    return true;
}

// Decides where the used blocks of recalled extents go: as many as fit go to the pool. Returns nullopt if there is no
// room for all.
std::optional<Portions> KvCache::portions_of_drain(std::span<const std::vector<BlockId>> used) const {
    const bool is_shared = division_.is_shared();
    Portions room;
    for (const std::vector<BlockId>& blocks : used) room.local.push_back(static_cast<int>(blocks.size()));
    room.staged.assign(groups_.size(), 0);
    for (int g = 0; g < num_groups(); ++g) {
        if (is_shared && division_.fits(room.local, Means::kEviction)) break;
        const BlockPool& pool = groups_[g].pool;
        const int num_used = room.local[g];
        const int elsewhere = std::min(num_unstaged(g) + num_used, pool.available(Place::kPeer));
        if (!is_shared && num_used > pool.available(Place::kLocal) + elsewhere) return {};
        room.staged[g] =
            is_shared ? std::clamp(elsewhere, 0, num_used) : std::max(0, num_used - pool.available(Place::kLocal));
        room.local[g] -= room.staged[g];
    }
    if (!division_.fits(room.local, Means::kEviction)) return {};
    room.wanted = room.local;
    return room;
}

// Moves cached blocks to free local ones, of which it leaves `num_local` for used blocks; the others are forgotten.
void KvCache::drain_cached(int g, const std::vector<BlockId>& leaving, int num_local) {
    const BlockPool& pool = groups_[g].pool;
    for (BlockId block : leaving) {
        if (pool.state(block) != BlockState::kLeaving) continue;  // evicted with another group's block of its node
        const bool has_room = pool.num_free(Place::kLocal) > num_local;
        if (!has_room || move_in(g, block) == kNone) evict(g, block);
    }
}

// Moves the first `num_across` used blocks to extents that stay and the others to the local pool. The extents come
// first, because cached blocks that make room in the local pool move to just such extents.
void KvCache::drain_used(int g, const std::vector<BlockId>& used, int num_across, std::span<BlockTable* const> tables) {
    if (used.empty()) return;
    std::unordered_map<int32_t, int32_t> moved;  // by entry
    for (int i = 0; i < static_cast<int>(used.size()); ++i) {
        const BlockId to = i < num_across ? move_across(g, used[i]) : move_in(g, used[i]);
        ensure(to != kNone, "there is as much room for draining blocks as was counted");
        moved.emplace(staged(used[i]), entry_of(g, to));
    }
    for (BlockTable* table : tables) {
        for (int32_t& entry : table->groups[g].entries) {
            if (!is_staged(entry)) continue;
            if (const auto found = moved.find(entry); found != moved.end()) entry = found->second;
        }
    }
}

// Moves a used block from one extent to another, through the layer-stream cache, as if the step had written it.
BlockId KvCache::move_across(int g, BlockId block) {
    KvGroup& group = groups_[g];
    const BlockId to = take_peer(g);
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
    return groups_[g].pool.is_lost(block) || std::binary_search(missing.begin(), missing.end(), block);
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
        const KvGroup& group = groups_[g];
        if (group.moves_in.empty() && group.pool.count(Place::kPeer, BlockState::kUsed) == 0) continue;
        for (int i = table.groups[g].first; i < num_blocks; ++i) {
            const BlockId block = block_of(g, table.groups[g].entries[i]);
            if (!is_attended(g, block) || group.pool.is_moving(block)) arrivals.emplace_back(g, block);
        }
    }
    return arrivals;
}

BlockPool::Location KvCache::locate(int g, BlockId borrowed) const {
    const KvGroup& group = groups_[g];
    const int64_t block_bytes = group.spec.layer_block_bytes * group.spec.num_layers;
    BlockPool::Location location = group.pool.locate(borrowed, block_bytes);
    location.link = group.borrow_links[location.link];
    return location;
}

bool KvCache::has_copies() const {
    return std::any_of(groups_.begin(), groups_.end(), [](const KvGroup& group) {
        return !group.spills.empty() || !group.moves_in.empty() || !group.moves_across.empty() ||
               !group.moves_up.empty();
    });
}

}  // namespace swiftkv
