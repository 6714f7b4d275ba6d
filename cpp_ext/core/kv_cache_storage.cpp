// The part of the cache that serves storage: it offers blocks to go down, and takes in blocks that come up.
//
// A block is loaded in one KV group at a time, because of a window group storage has only the tails of boundaries.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "../common/check.h"
#include "kv_cache.h"

namespace swiftkv {
namespace {

// Write-back keeps 1 / kNumPartsOfPool of a group's blocks free or stored.
constexpr int kNumPartsOfPool = 4;

}  // namespace

// ---- down ----

void KvCache::set_write_policy(WritePolicy policy) {
    offers_.set_policy(policy);
    for (KvGroup& group : groups_) group.pool.forget_seen();
    if (policy == WritePolicy::kWriteThrough) offer_all();
}

// Offers all blocks that are here, for storage that is attached late or detached soon. The most recently used blocks
// come first, and so does the beginning of a prefix.
void KvCache::offer_all() {
    for (int g = 0; g < num_groups(); ++g) {
        std::vector<NodeId> nodes;
        groups_[g].pool.for_each_cached([&](BlockId block) {
            nodes.push_back(groups_[g].pool.node(block));
            return true;
        });
        for (auto it = nodes.rbegin(); it != nodes.rend(); ++it) offer_groups(*it);
    }
    index_.for_each([&](NodeId node) { offer_groups(node); });
}

void KvCache::offer_groups(NodeId node) {
    for (int g = 0; g < num_groups(); ++g) offer(g, node);
}

// Offers the blocks that are evicted next, until `max_blocks` offers wait: so many that a part of the pool can be taken
// at once without losing a block that is nowhere else. It looks at a block only once while that stays cached, because
// nothing that goes with the block becomes worth offering later.
void KvCache::offer_next_to_go(int max_blocks) {
    for (int g = 0; g < num_groups(); ++g) {
        groups_[g].pool.see_next(num_near_eviction(g), [&](BlockId block) {
            if (offers_.num_waiting() >= max_blocks) return false;
            offer_what_goes_with(g, groups_[g].pool.node(block));
            return true;
        });
    }
}

// Returns the number of a group's cached blocks that are evicted when a part of its blocks is taken at once; none if it
// is < 0.
int KvCache::num_near_eviction(int g) const {
    const BlockPool& pool = groups_[g].pool;
    const int num_free = pool.num_free(Place::kLocal) + pool.num_free(Place::kPeer) + division_.unclaimed(g);
    return (num_home_blocks(g) + pool.num_held()) / kNumPartsOfPool - num_free;
}

// Offers the blocks that evict() forgets together with a node's block of a group, and all tails that contain the node:
// they are of no use without it.
void KvCache::offer_what_goes_with(int g, NodeId node) {
    bool is_new = false;
    for (int h = 0; h < num_groups(); ++h)
        if (h == g || groups_[g].spec.window == 0) is_new |= offer(h, node);
    if (!is_new) return;
    for (NodeId beside : boundaries_.nodes_beside(node))
        for (int h = 0; h < num_groups(); ++h)
            if (groups_[h].spec.window > 0) offer(h, beside);
}

// Offers a block; returns false if storage has it or was offered it, or if it is not worth storing.
bool KvCache::offer(int g, NodeId node) {
    return is_worth_storing(g, index_.block(node, g)) && offers_.add(node, g, index_.key(node));
}

// Whether a block is worth storing: a window's block only if a boundary keeps it. False for kNone.
bool KvCache::is_worth_storing(int g, BlockId block) const {
    if (block == kNone || !can_store(g, block)) return false;
    return groups_[g].spec.window == 0 || groups_[g].pool.worth(block) != Worth::kNone;
}

bool KvCache::is_lost_unstored(int g, NodeId node) const {
    return offers_.policy() == WritePolicy::kWriteBack && !offers_.is_marked(node, g) &&
           is_worth_storing(g, index_.block(node, g));
}

void KvCache::offer_committed(NodeId node, const BlockKey& key) {
    if (offers_.policy() != WritePolicy::kWriteThrough) return;
    for (int g = 0; g < num_groups(); ++g)
        if (groups_[g].spec.window == 0) offers_.add(node, g, key);
}

// Offers the tail of a boundary and one block more, because a prompt that ends with the boundary can only use the
// prefix that is a block shorter. `nodes`: the nodes before the boundary, the last one first.
void KvCache::offer_tail(std::span<const NodeId> nodes, std::span<const BlockKey> keys) {
    if (offers_.policy() != WritePolicy::kWriteThrough) return;
    for (int g = 0; g < num_groups(); ++g) {
        if (groups_[g].spec.window == 0) continue;
        const int size = std::min(static_cast<int>(nodes.size()), groups_[g].num_tail + 1);
        for (int i = 0; i < size; ++i)
            if (index_.block(nodes[i], g) != kNone) offers_.add(nodes[i], g, keys[keys.size() - 1 - i]);
    }
}

void KvCache::offer_hit(std::span<const NodeId> path, std::span<const BlockKey> keys, int length) {
    if (offers_.policy() == WritePolicy::kWriteThroughSelective) offer_match(path, keys, length);
}

void KvCache::offer_prefix(std::span<const BlockKey> keys) {
    if (offers_.policy() == WritePolicy::kNever) return;
    std::vector<NodeId> path;
    const int length = match(keys, path).length;
    offer_match(path, keys, length);
}

void KvCache::offer_match(std::span<const NodeId> path, std::span<const BlockKey> keys, int length) {
    for (int g = 0; g < num_groups(); ++g)
        for (int i = first_of_match(g, length); i < length; ++i) offers_.add(path[i], g, keys[i]);
}

std::vector<StoredBlock> KvCache::take_offers(int max_blocks) {
    if (offers_.policy() == WritePolicy::kWriteBack) offer_next_to_go(max_blocks);
    std::vector<StoredBlock> taken;
    while (offers_.num_waiting() > 0 && static_cast<int>(taken.size()) < max_blocks) {
        const Offers::Offer offer = offers_.take();
        const NodeId node = index_.find(offer.key);
        const BlockId block = node == kNone ? kNone : index_.block(node, offer.group);
        if (block != kNone && can_store(offer.group, block)) {
            taken.push_back(stored_block(offer.key, offer.group, block));
        } else {
            offers_.count_dropped();
        }
    }
    return taken;
}

bool KvCache::can_store(int g, BlockId block) const {
    return groups_[g].pool.state(block) != BlockState::kLoading;
}

StoredBlock KvCache::stored_block(const BlockKey& key, int g, BlockId block) const {
    if (is_attended(g, block)) return {key, g, kNone, attended_offset_bytes(g, block)};
    const BlockPool::Location location = locate(g, block);
    return {key, g, location.link, location.offset_bytes};
}

int64_t KvCache::attended_offset_bytes(int g, BlockId attended) const {
    const GroupSpec& spec = groups_[g].spec;
    return spec.base_offset_bytes + int64_t{entry_of(g, attended)} * spec.layer_block_bytes;
}

// ---- up ----

std::vector<uint8_t> KvCache::residency(std::span<const BlockKey> keys) const {
    std::vector<uint8_t> is_resident(keys.size() * groups_.size());
    index_.find_each(keys, [&](size_t i, NodeId node) {
        for (int g = 0; node != kNone && g < num_groups(); ++g)
            is_resident[i * groups_.size() + g] = index_.block(node, g) != kNone;
        return true;
    });
    return is_resident;
}

int KvCache::usable_length(std::span<const uint8_t> is_there) const {
    std::vector<int> run(groups_.size(), 0);
    const int num_blocks = static_cast<int>(is_there.size() / groups_.size());
    int usable = 0;
    for (int i = 0; i < num_blocks; ++i) {
        bool is_usable = true;
        for (int g = 0; g < num_groups(); ++g) {
            run[g] = is_there[i * groups_.size() + g] ? run[g] + 1 : 0;
            if (groups_[g].spec.window == 0 && run[g] == 0) return usable;
            is_usable &= run[g] >= i + 1 - first_of_match(g, i + 1);
        }
        if (is_usable) usable = i + 1;
    }
    return usable;
}

int KvCache::local_room(std::span<const BlockKey> keys, PinnedChunks pinned) const {
    std::vector<int> needed(groups_.size(), 0);
    int length = 0;
    index_.find_each(keys, [&](size_t i, NodeId node) {
        const int longer = static_cast<int>(i) + 1;
        for (int g = 0; g < num_groups(); ++g) {
            const BlockId block = node == kNone ? kNone : index_.block(node, g);
            if (groups_[g].spec.window > 0)  // a group that shares no extents has room for its tail
                needed[g] = division_.is_shared() ? longer - first_of_match(g, longer) : 0;
            else if (block == kNone ? attended_block(g, pinned_chunk(g, i, pinned)) == kNone
                                    : groups_[g].pool.place(block) == Place::kLocal)
                ++needed[g];
        }
        if (!division_.fits_alone(needed)) return false;
        length = longer;
        return true;
    });
    return length;
}

// Holds the blocks of the prefix that are here meanwhile, so that they are not evicted for the missing ones, and are
// the last to be evicted afterwards. Does the same with the prefixes `kept` if blocks have to be evicted. As these are
// many, the cache remembers that there was no room beside them.
std::vector<LoadingBlock> KvCache::begin_load(std::span<const BlockKey> keys, int first, PinnedChunks pinned,
                                              Spare spare, std::span<const std::span<const BlockKey>> kept) {
    std::vector<LoadingBlock> loading = missing_from(keys, first, pinned);
    std::vector<int> needed(groups_.size(), 0);
    for (const LoadingBlock& load : loading) needed[load.group] += load.block == kNone;
    std::vector<int> wanted = needed;
    for (int g = 0; g < num_groups(); ++g) wanted[g] += wanted[g] > 0 ? spare.of(spec(g)) : 0;
    const auto let_go_of = [&](const std::vector<std::pair<int, BlockId>>& blocks, auto let_go) {
        for (auto it = blocks.rbegin(); it != blocks.rend(); ++it) (groups_[it->first].pool.*let_go)(it->second);
    };
    const bool must_evict = !division_.fits(wanted, Means::kNone);
    const auto has_room_now = [&] { return division_.fits(wanted, must_evict ? Means::kEviction : Means::kNone); };
    if (must_evict && (!has_room_now() || is_known_to_lack_room(wanted, kept))) return {};
    std::vector<std::pair<int, BlockId>> held_of_kept, held;
    if (must_evict)
        for (std::span<const BlockKey> prefix : kept) hold_present(prefix, held_of_kept);
    const bool has_room_beside_kept = has_room_now();
    if (has_room_beside_kept) hold_present(keys, held);
    const bool has_room = has_room_beside_kept && has_room_now();
    if (has_room) {
        enter_missing(needed, wanted);
        for (LoadingBlock& load : loading) load_into(load, keys[load.index], wanted);
        if (has_windows_ && !loading.empty()) keep_boundary(keys, static_cast<int>(keys.size()), Worth::kKept);
        let_go_of(held_of_kept, &BlockPool::drop_ref);
        let_go_of(held, &BlockPool::drop_ref);
        return loading;
    }
    let_go_of(held, &BlockPool::undo_ref);
    let_go_of(held_of_kept, &BlockPool::undo_ref);
    if (!has_room_beside_kept) {
        no_room_ = {num_moves(), std::move(wanted), {}};
        for (std::span<const BlockKey> prefix : kept) no_room_->kept.push_back(prefix.back());
    }
    return {};
}

// Returns the blocks that a prefix needs from block `first` on and that are missing, with their chunks, and their
// blocks in host memory.
std::vector<LoadingBlock> KvCache::missing_from(std::span<const BlockKey> keys, int first, PinnedChunks pinned) const {
    const int length = static_cast<int>(keys.size());
    std::vector<LoadingBlock> missing;
    for (int g = 0; g < num_groups(); ++g) {
        for (int i = std::max(first, first_of_match(g, length)); i < length; ++i) {
            const NodeId node = index_.find(keys[i]);
            if (node != kNone && index_.block(node, g) != kNone) continue;
            const int chunk = pinned_chunk(g, static_cast<size_t>(i), pinned);
            const BlockId block = attended_block(g, chunk);
            const bool is_used = block != kNone || spec(g).source.count > 0;
            missing.push_back({i, g, is_used ? chunk : kNone, block, 0});
        }
    }
    return missing;
}

int KvCache::pinned_chunk(int g, size_t index, PinnedChunks pinned) const {
    return pinned.empty() ? kNone : pinned[index * groups_.size() + g];
}

// Returns the block in host memory of a pinned chunk. kNone if the group is not attended there, or if requests still
// hold the block although the index has forgotten it: then storage reads its bytes.
BlockId KvCache::attended_block(int g, int chunk) const {
    if (chunk == kNone || spec(g).host.count == 0) return kNone;
    const BlockId block = groups_[g].pool.host_block(chunk);
    return groups_[g].pool.state(block) == BlockState::kAbsent ? block : kNone;
}

// Holds the blocks that a prefix needs and that are here.
void KvCache::hold_present(std::span<const BlockKey> keys, std::vector<std::pair<int, BlockId>>& held) {
    const int length = static_cast<int>(keys.size());
    for (int g = 0; g < num_groups(); ++g) {
        for (int i = first_of_match(g, length); i < length; ++i) {
            const NodeId node = index_.find(keys[i]);
            const BlockId block = node == kNone ? kNone : index_.block(node, g);
            if (block == kNone || groups_[g].pool.state(block) == BlockState::kLoading) continue;
            groups_[g].pool.add_ref(block);
            held.emplace_back(g, block);
        }
    }
}

// Whether there is no room for so many blocks or more if nothing of `kept` may be evicted: there was none for as many
// or fewer beside some of these prefixes, and no block has changed since.
bool KvCache::is_known_to_lack_room(std::span<const int> wanted,
                                    std::span<const std::span<const BlockKey>> kept) const {
    if (!no_room_ || no_room_->num_moves != num_moves()) return false;
    if (!std::equal(wanted.begin(), wanted.end(), no_room_->wanted.begin(), std::greater_equal<>())) return false;
    auto next = no_room_->kept.begin();  // both are in the order of the requests
    for (std::span<const BlockKey> prefix : kept)
        if (next != no_room_->kept.end() && prefix.back() == *next) ++next;
    return next == no_room_->kept.end();
}

int64_t KvCache::num_moves() const {
    int64_t num_moves = 0;
    for (const KvGroup& group : groups_) num_moves += group.pool.num_moves();
    return num_moves;
}

// Takes a local block to load into, unless the block lies in host memory. `wanted`, as in Division, is lessened by a
// local block.
void KvCache::load_into(LoadingBlock& load, const BlockKey& key, std::vector<int>& wanted) {
    BlockPool& pool = groups_[load.group].pool;
    if (load.block == kNone) {
        free_one(load.group, wanted);
        --wanted[load.group];
        load.block = pool.start_loading();
        if (load.chunk != kNone) groups_[load.group].coming.push_back({load.chunk, load.block});
    } else {
        pool.start_loading(load.block);
    }
    load.offset_bytes = attended_offset_bytes(load.group, load.block);
    const NodeId node = index_.find_or_insert(key);
    pool.set_node(load.block, node);
    if (groups_[load.group].spec.window > 0) pool.set_worth(load.block, Worth::kKept);
    point_to(node, load.group, load.block);
    offers_.mark_stored(node, load.group);
}

Back KvCache::find_back(std::span<const BlockKey> keys, int num_before) const {
    const int length = static_cast<int>(keys.size());
    Back back{length, length};
    for (int i = length - 1; i >= num_before; --i) {
        const NodeId node = index_.find(keys[i]);
        bool is_coming = node != kNone, is_here = node != kNone;
        for (int g = 0; is_coming && g < num_groups(); ++g) {
            if (i < first_of_match(g, length)) continue;
            const BlockId block = index_.block(node, g);
            is_coming = block != kNone && is_attended(g, block);
            is_here &= is_coming && groups_[g].pool.state(block) != BlockState::kLoading;
        }
        if (!is_coming) break;
        back.coming = i;
        if (is_here && back.here == i + 1) back.here = i;
    }
    return back;
}

int64_t KvCache::needed_bytes(int begin, int end, int length) const {
    int64_t num_bytes = 0;
    for (int g = 0; g < num_groups(); ++g) {
        const GroupSpec& group = spec(g);
        const int num_blocks = std::max(0, end - std::max(begin, first_of_match(g, length)));
        num_bytes += int64_t{num_blocks} * group.num_layers * group.layer_block_bytes;
    }
    return num_bytes;
}

void KvCache::take_back(BlockTable& table, std::span<const BlockKey> keys) {
    const int length = static_cast<int>(keys.size());
    for (int g = 0; g < num_groups(); ++g) {
        auto& [entries, first] = table.groups[g];
        for (; static_cast<int>(entries.size()) > table.num_committed; entries.pop_back())
            let_go(g, block_of(g, entries.back()));
        for (; first < std::min(table.num_committed, first_of_match(g, length)); ++first) {
            let_go(g, block_of(g, entries[first]));
            entries[first] = kNoBlock;
        }
        first = std::max(first, first_of_match(g, length));
        entries.resize(length, kNoBlock);
        for (int i = std::max(table.num_committed, first); i < length; ++i) {
            const BlockId block = index_.block(index_.find(keys[i]), g);
            groups_[g].pool.add_ref(block);
            entries[i] = entry_of(g, block);
        }
    }
    table.num_committed = length;
    if (has_windows_) keep_boundary(keys, length, Worth::kKept);
}

void KvCache::check_loading(std::span<const LoadedBlock> blocks) const {
    for (const LoadedBlock& b : blocks) {
        const bool is_known =
            b.group >= 0 && b.group < num_groups() && b.block >= 0 && b.block < groups_[b.group].pool.num_ids();
        if (!is_known || groups_[b.group].pool.state(b.block) != BlockState::kLoading)
            throw std::invalid_argument("blocks: block " + std::to_string(b.block) + " of group " +
                                        std::to_string(b.group) + " is not loading");
    }
    std::vector<std::pair<int, BlockId>> sorted;
    for (const LoadedBlock& b : blocks) sorted.emplace_back(b.group, b.block);
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
        throw std::invalid_argument("blocks: one is named twice");
}

void KvCache::forget_loading(std::span<const LoadedBlock> blocks) {
    for (const LoadedBlock& b : blocks)
        if (groups_[b.group].pool.node(b.block) != kNone) evict(b.group, b.block);
}

void KvCache::end_load(std::span<const LoadedBlock> blocks, bool is_loaded) {
    if (!is_loaded) forget_loading(blocks);
    // Last block first: see evict().
    for (auto it = blocks.rbegin(); it != blocks.rend(); ++it) groups_[it->group].pool.stop_loading(it->block);
    for (const LoadedBlock& b : blocks) tell_loaded(b.group, b.block, is_loaded);
}

// ---- host memory ----

// A block that the index has forgotten meanwhile is not copied.
void KvCache::move_up() {
    for (int g = 0; g < num_groups(); ++g) {
        BlockPool& pool = groups_[g].pool;
        for (const ChunkCopy& copy : std::exchange(groups_[g].coming, {})) {
            const bool is_wanted = pool.node(copy.local) != kNone;
            pool.stop_loading(copy.local);
            tell_loaded(g, copy.local, is_wanted);
            if (is_wanted) {
                pool.add_ref(copy.local);
                groups_[g].moves_up.push_back(copy);
            } else {
                pool.note_unpinned(copy.chunk);
            }
        }
    }
}

bool KvCache::has_moves_up() const {
    return std::ranges::any_of(groups_, [](const KvGroup& group) { return !group.moves_up.empty(); });
}

std::vector<int> KvCache::take_unpinned() {
    std::vector<int> chunks;
    for (KvGroup& group : groups_) {
        const std::vector<int> of_group = group.pool.take_unpinned();
        chunks.insert(chunks.end(), of_group.begin(), of_group.end());
    }
    return chunks;
}

void KvCache::evict_host() {
    for (int g = 0; g < num_groups(); ++g)
        for (BlockId b; (b = groups_[g].pool.oldest_cached(Place::kHost)) != kNone;) evict(g, b);
}

}  // namespace swiftkv
