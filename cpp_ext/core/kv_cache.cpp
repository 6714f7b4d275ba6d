#include "kv_cache.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

#include "../common/check.h"

namespace swiftkv {
namespace {

std::vector<Link> links_of(const std::vector<Link>& links, int group) {
    std::vector<Link> found;
    std::copy_if(links.begin(), links.end(), std::back_inserter(found),
                 [&](const Link& link) { return link.group == group; });
    return found;
}

std::vector<int> tails_of(const std::vector<GroupSpec>& groups, int block_size) {
    std::vector<int> tails;
    for (const GroupSpec& spec : groups) tails.push_back(spec.window == 0 ? kNone : tail_blocks(spec, block_size));
    return tails;
}

int count_blocks(const std::vector<GroupSpec>& groups, const std::vector<Link>& borrow_links) {
    int total = 0;
    for (const GroupSpec& g : groups) total += g.num_blocks;
    for (const Link& link : borrow_links) total += link.num_extents * link.blocks_per_extent;
    for (const GroupSpec& g : groups) total += g.host.count;
    return total;
}

}  // namespace

void extend_keys(std::vector<BlockKey>& keys, const Hash& root, std::span<const TokenId> tokens, int block_size) {
    const size_t num_blocks = tokens.size() / block_size;
    if (keys.empty()) keys.reserve(num_blocks);
    for (size_t i = keys.size(); i < num_blocks; ++i) {
        const auto block = tokens.subspan(i * block_size, block_size);
        const auto* bytes = reinterpret_cast<const uint8_t*>(block.data());
        keys.push_back(blake3_keyed(i == 0 ? root : keys.back(), {bytes, block.size_bytes()}));
    }
}

KvCache::KvCache(std::vector<GroupSpec> groups, int block_size, const std::vector<Link>& lend_links,
                 const std::vector<Link>& borrow_links, int extents_for_windows)
    : block_size_(block_size),
      division_(groups, groups_, !borrow_links.empty(), extents_for_windows),
      index_(static_cast<int>(groups.size()), count_blocks(groups, borrow_links)),
      boundaries_(tails_of(groups, block_size)),
      offers_(static_cast<int>(groups.size()), count_blocks(groups, borrow_links)) {
    for (int g = 0; g < static_cast<int>(groups.size()); ++g) {
        const GroupSpec& spec = groups[g];
        BlockPool pool(spec.num_blocks, links_of(lend_links, g), links_of(borrow_links, g),
                       {division_.house(), g, spec.blocks_per_extent}, spec.host.count);
        const int num_tail = spec.window == 0 ? 0 : tail_blocks(spec, block_size);
        groups_.push_back({spec, num_tail, std::move(pool), {}});
        has_full_attention_ |= spec.window == 0;
        has_windows_ |= spec.window > 0;
        can_attend_host_ |= spec.host.count > 0;
        can_move_up_ |= spec.source.count > 0;
    }
    std::vector<int> num_lending(groups.size());
    for (const Link& link : lend_links) lend_links_.push_back({link.group, num_lending[link.group]++});
    for (const Link& link : borrow_links) {
        std::vector<int>& numbers = groups_[link.group].borrow_links;
        borrow_links_.push_back({link.group, static_cast<int>(numbers.size())});
        numbers.push_back(static_cast<int>(borrow_links_.size()) - 1);
    }
}

template <class IsThere>
PrefixMatch KvCache::match(std::span<const BlockKey> keys, std::vector<NodeId>& path, IsThere&& is_there) const {
    PrefixMatch found{};
    // The length of the run of resident blocks that ends at the current block, per group.
    std::vector<int> run(groups_.size(), 0);
    index_.find_each(keys, [&](size_t i, NodeId node) {
        const int length = static_cast<int>(i) + 1;
        if (node == kNone && has_full_attention_) return false;
        bool is_usable = true;
        for (int g = 0; g < num_groups(); ++g) {
            const BlockId block = node == kNone ? kNone : index_.block(node, g);
            const bool is_resident = block != kNone && is_there(g, block);
            run[g] = is_resident ? run[g] + 1 : 0;
            const int needed = groups_[g].spec.window == 0 ? length : std::min(length, groups_[g].num_tail);
            is_usable &= run[g] >= needed;
        }
        path.push_back(node);
        if (is_usable) found.length = length;
        if (node != kNone) found.num_known = length;
        return true;
    });
    return found;
}

PrefixMatch KvCache::match(std::span<const BlockKey> keys, std::vector<NodeId>& path) const {
    return match(keys, path, [](int, BlockId) { return true; });
}

PrefixMatch KvCache::acquire_prefix(BlockTable& table, std::span<const BlockKey> keys) {
    path_.clear();
    const PrefixMatch found = match(keys, path_);
    hold_match(table, found.length);
    offer_hit(path_, keys, found.length);
    return found;
}

int KvCache::acquire_attended_prefix(BlockTable& table, std::span<const BlockKey> keys) {
    path_.clear();
    const auto is_there = [&](int g, BlockId block) {
        return is_attended(g, block) && groups_[g].pool.state(block) != BlockState::kLoading;
    };
    const int length = match(keys, path_, is_there).length;
    hold_match(table, length);
    return length;
}

// Gives the table the first `length` blocks of the match, whose nodes are in `path_`.
void KvCache::hold_match(BlockTable& table, int length) {
    for (int g = 0; g < num_groups(); ++g) {
        KvGroup& group = groups_[g];
        BlockTable::Group& held = table.groups[g];
        held.first = first_of_match(g, length);
        held.entries.assign(length, kNoBlock);
        for (int i = held.first; i < length; ++i) {
            const BlockId block = index_.block(path_[i], g);
            group.pool.add_ref(block);
            held.entries[i] = entry_of(g, block);
        }
    }
    table.num_committed = length;
}

bool KvCache::is_indexed(const BlockTable& table) const {
    for (int g = 0; g < num_groups(); ++g)
        for (size_t i = table.groups[g].first; i < table.groups[g].entries.size(); ++i)
            if (groups_[g].pool.node(block_of(g, table.groups[g].entries[i])) == kNone) return false;
    return true;
}

int KvCache::count_known(std::span<const BlockKey> keys, int before) const {
    int known = before;
    index_.find_each(keys.subspan(before), [&](size_t, NodeId node) {
        known += node != kNone;
        return node != kNone;
    });
    if (known > before) return known;
    while (known > 0 && index_.find(keys[known - 1]) == kNone) --known;
    return known;
}

bool KvCache::has_loading() const {
    return std::any_of(groups_.begin(), groups_.end(), [](const KvGroup& group) {
        return group.pool.count(Place::kLocal, BlockState::kLoading) > 0 ||
               group.pool.count(Place::kHost, BlockState::kLoading) > 0;
    });
}

bool KvCache::is_loading(std::span<const BlockKey> keys) const {
    if (!has_loading()) return false;
    std::vector<NodeId> path;
    const int length = match(keys, path).length;
    for (int g = 0; g < num_groups(); ++g) {
        const KvGroup& group = groups_[g];
        for (int i = first_of_match(g, length); i < length; ++i)
            if (group.pool.state(index_.block(path[i], g)) == BlockState::kLoading) return true;
    }
    return false;
}

int KvCache::first_of_match(int g, int length) const {
    return groups_[g].spec.window == 0 ? 0 : std::max(0, length - groups_[g].num_tail);
}

std::vector<int32_t> KvCache::blocks_in(Place place, const BlockTable& table) const {
    const auto lies_there = [&](int g, int32_t entry) {
        return entry != kNoBlock && groups_[g].pool.place(block_of(g, entry)) == place;
    };
    std::vector<bool> is_in(table.groups[0].entries.size());
    for (int g = 0; g < num_groups(); ++g) {
        if (groups_[g].pool.count(place, BlockState::kUsed) == 0) continue;
        for (size_t i = 0; i < is_in.size(); ++i)
            if (lies_there(g, table.groups[g].entries[i])) is_in[i] = true;
    }
    std::vector<int32_t> blocks;
    for (size_t i = 0; i < is_in.size(); ++i)
        if (is_in[i]) blocks.push_back(static_cast<int32_t>(i));
    return blocks;
}

bool KvCache::extend(BlockTable& table, int chunk_end, int prompt_end, Spare spare) {
    if (short_group(table, chunk_end, prompt_end, spare) != kNone) return false;
    if (division_.is_shared()) {
        extend_in_house(table, missing_blocks(table, chunk_end, prompt_end), spare);
        return true;
    }
    for (int g = 0; g < num_groups(); ++g) {
        const int needed = missing(table, g, chunk_end, prompt_end);
        if (needed <= 0) continue;
        std::vector<int32_t>& entries = table.groups[g].entries;
        const size_t old_size = entries.size();
        entries.resize(old_size + needed);
        const auto put = [&](int i, BlockId block) {
            ensure(block != kNone, "there are as many blocks as were counted");
            entries[old_size + i] = entry_of(g, block);
        };
        // Takes borrowed blocks first: cached blocks that move out of the local pool would take them.
        const int num_local = std::min(needed, groups_[g].pool.available(Place::kLocal));
        for (int i = num_local; i < needed; ++i) put(i, take_peer(g));
        for (int i = 0; i < num_local; ++i) put(i, take_local(g));
    }
    return true;
}

// Frees a local block; false if none is free or cached.
bool KvCache::make_local_room(int g) {
    BlockPool& pool = groups_[g].pool;
    if (pool.num_free(Place::kLocal) > 0) return true;
    if (division_.is_shared()) return make_room_in_house(g);
    const BlockId cached = pool.oldest_cached(Place::kLocal);
    if (cached == kNone) return false;
    demote(g, cached);
    return true;
}

BlockId KvCache::take_local(int g) {
    return make_local_room(g) ? groups_[g].pool.take(Place::kLocal) : kNone;
}

// Takes a free borrowed block, or else evicts the least recently used one.
BlockId KvCache::take_peer(int g) {
    BlockPool& pool = groups_[g].pool;
    if (pool.available(Place::kPeer) == 0) return kNone;
    if (pool.num_free(Place::kPeer) == 0) evict(g, pool.oldest_cached(Place::kPeer));
    return pool.take(Place::kPeer);
}

// Whether a cached local block may take a borrowed one: a free one, or one that is worth no more.
bool KvCache::is_wanted_by_peers(int g, BlockId cached) const {
    const BlockPool& pool = groups_[g].pool;
    if (groups_[g].spec.window == 0) return true;
    if (pool.worth(cached) == Worth::kNone) return false;
    const BlockId oldest = pool.oldest_cached(Place::kPeer);
    const bool has_free = oldest == kNone || pool.num_free(Place::kPeer) > 0;
    return has_free || pool.worth(oldest) <= pool.worth(cached);
}

// Moves a cached local block to a peer, where less recently used blocks make room for it. Forgets it if nothing is
// borrowed, or no boundary needs it.
void KvCache::demote(int g, BlockId cached) {
    KvGroup& group = groups_[g];
    const BlockId to = is_wanted_by_peers(g, cached) ? take_peer(g) : kNone;
    if (to == kNone) {
        evict(g, cached);
        return;
    }
    point_to(group.pool.node(cached), g, to);
    group.pool.keep_extent_of(cached);
    group.pool.replace(cached, to);
    group.spills.push_back({to, cached});
}

// Moves a borrowed block, cached or used, to a local one.
BlockId KvCache::move_in(int g, BlockId borrowed) {
    KvGroup& group = groups_[g];
    const BlockId to = take_local(g);
    if (to == kNone) return kNone;
    if (const NodeId node = group.pool.node(borrowed); node != kNone) point_to(node, g, to);
    group.pool.replace(borrowed, to);
    group.moves_in.push_back({borrowed, to});
    return to;
}

bool KvCache::is_moving_across(int g, BlockId block) const {
    const std::vector<BlockMove>& moves = groups_[g].moves_across;
    return std::any_of(moves.begin(), moves.end(), [&](const BlockMove& move) { return move.to == block; });
}

template <class MayGoOn>
void KvCache::promote_while(BlockTable& table, int g, int& max_blocks, MayGoOn&& may_go_on) {
    BlockPool& pool = groups_[g].pool;
    if (pool.count(Place::kPeer, BlockState::kUsed) == 0) return;
    for (int32_t& entry : table.groups[g].entries) {
        if (max_blocks == 0 || !may_go_on()) break;
        if (!is_staged(entry)) continue;
        const BlockId borrowed = staged_place(entry);
        if (pool.refs(borrowed) != 1 || is_moving_across(g, borrowed)) continue;
        const BlockId to = move_in(g, borrowed);
        if (to == kNone) break;
        entry = entry_of(g, to);
        --max_blocks;
    }
}

void KvCache::promote(BlockTable& table, int spare, int max_blocks) {
    if (!can_borrow()) return;
    // Blocks that cannot be staged go first: the room that was counted for them may lie in any group.
    for (int g = 0; division_.is_shared() && g < num_groups(); ++g)
        promote_while(table, g, max_blocks, [&] { return overdraft(g) > 0; });
    for (int g = 0; g < num_groups(); ++g)
        promote_while(table, g, max_blocks, [&] { return division_.obtainable(g) > spare; });
}

void KvCache::commit(BlockTable& table, std::span<const BlockKey> keys, int num_blocks, std::span<const TokenId> tokens,
                     const BlockKey& root) {
    ensure(num_blocks <= static_cast<int>(keys.size()), "a block that is committed is full");
    for (const BlockTable::Group& held : table.groups)
        ensure(num_blocks <= static_cast<int>(held.entries.size()), "a block that is committed is held");
    for (int i = table.num_committed; i < num_blocks; ++i) {
        const NodeId node = index_.find_or_insert(keys[i]);
        const BlockText text = events_.is_on() ? text_of(tokens, root, keys, i) : BlockText{};
        for (int g = 0; g < num_groups(); ++g) adopt(g, table.groups[g].entries[i], node, text);
        offer_committed(node, keys[i]);
    }
    table.num_committed = std::max(table.num_committed, num_blocks);
}

std::vector<BlockId> KvCache::begin_loading(const BlockKey& key) {
    std::vector<int> wanted(groups_.size(), 1);
    if (index_.find(key) != kNone || !division_.fits(wanted, Means::kNone)) return {};
    const NodeId node = index_.find_or_insert(key);
    std::vector<BlockId> blocks;
    for (int g = 0; g < num_groups(); ++g) {
        free_one(g, wanted);
        --wanted[g];
        blocks.push_back(groups_[g].pool.start_loading());
        groups_[g].pool.set_node(blocks[g], node);
        // It is loaded because a request will want it.
        if (groups_[g].spec.window > 0) groups_[g].pool.set_worth(blocks[g], Worth::kKept);
        point_to(node, g, blocks[g]);
    }
    return blocks;
}

void KvCache::end_loading(std::span<const BlockId> blocks, bool is_loaded) {
    const auto is_loading = [&](int g, BlockId b) {
        return b >= 0 && b < groups_[g].pool.num_local() && groups_[g].pool.state(b) == BlockState::kLoading;
    };
    if (static_cast<int>(blocks.size()) != num_groups())
        throw std::invalid_argument("blocks: one of each KV group is loaded at once");
    for (int g = 0; g < num_groups(); ++g)
        if (!is_loading(g, blocks[g]))
            throw std::invalid_argument("blocks: block " + std::to_string(blocks[g]) + " is not loading");
    for (int g = 0; g < num_groups(); ++g) {
        if (!is_loaded && groups_[g].pool.node(blocks[g]) != kNone) evict(g, blocks[g]);
        groups_[g].pool.stop_loading(blocks[g]);
        tell_loaded(g, blocks[g], is_loaded);
    }
}

void KvCache::adopt(int g, int32_t& entry, NodeId node, const BlockText& text) {
    BlockPool& pool = groups_[g].pool;
    const BlockId known = index_.block(node, g);
    const BlockId own = block_of(g, entry);
    // A block that is attended where it lies is worth more, and one that is loading may never arrive.
    const bool is_better = known != kNone && is_attended(g, own) && !is_attended(g, known);
    if (known == kNone || is_better || pool.state(known) == BlockState::kLoading) {
        if (known != kNone) {
            pool.forget(known);
            offers_.forget(node, g);  // storage may not have it after all
        }
        point_to(node, g, own, text);
        pool.set_node(own, node);
        if (groups_[g].spec.window > 0) pool.set_worth(own, boundaries_.worth(node, g));
    } else {
        pool.add_ref(known);
        let_go(g, own);
        entry = entry_of(g, known);
    }
}

std::vector<GroupStats> KvCache::stats() const {
    std::vector<GroupStats> stats;
    for (int g = 0; g < num_groups(); ++g) {
        const auto local = [&](BlockState state) { return groups_[g].pool.count(Place::kLocal, state); };
        const auto borrowed = [&](BlockState state) { return groups_[g].pool.count(Place::kPeer, state); };
        const auto in_host = [&](BlockState state) { return groups_[g].pool.count(Place::kHost, state); };
        stats.push_back({.free = local(BlockState::kFree),
                         .used = local(BlockState::kUsed),
                         .cached = local(BlockState::kCached),
                         .lent = local(BlockState::kLent),
                         .in_flight = local(BlockState::kInFlight),
                         .staging = local(BlockState::kStaging),
                         .loading = local(BlockState::kLoading),
                         .elsewhere = local(BlockState::kAbsent),
                         .total = groups_[g].spec.num_blocks,
                         .borrowed_free = borrowed(BlockState::kFree),
                         .borrowed_used = borrowed(BlockState::kUsed),
                         .borrowed_cached = borrowed(BlockState::kCached) + borrowed(BlockState::kLeaving),
                         .borrowed_in_flight = borrowed(BlockState::kInFlight),
                         .staging_layer_blocks = num_staging_layer_blocks(g),
                         .host_used = in_host(BlockState::kUsed),
                         .host_cached = in_host(BlockState::kCached),
                         .host_in_flight = in_host(BlockState::kInFlight),
                         .host_loading = in_host(BlockState::kLoading)});
    }
    return stats;
}

}  // namespace swiftkv
