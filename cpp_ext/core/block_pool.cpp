#include "block_pool.h"

#include <algorithm>
#include <utility>

#include "../common/check.h"

namespace swiftkv {

namespace {

bool is_reclaimable(BlockState state) {
    return state == BlockState::kFree || state == BlockState::kCached;
}

// Returns one past the last block of each place.
std::array<BlockId, kNumPlaces> ends_of_places(int num_local, const std::vector<Link>& borrow_links, int num_host) {
    std::array<BlockId, kNumPlaces> ends{num_local};
    ends[static_cast<int>(Place::kHost)] = num_host;
    for (const Link& link : borrow_links)
        ends[static_cast<int>(Place::kPeer)] += link.num_extents * link.blocks_per_extent;
    for (int place = 1; place < kNumPlaces; ++place) ends[place] += ends[place - 1];
    return ends;
}

}  // namespace

BlockPool::BlockPool(int num_local, const std::vector<Link>& lend_links, const std::vector<Link>& borrow_links,
                     Tenancy tenancy, int num_host)
    : num_local_(num_local),
      ends_(ends_of_places(num_local, borrow_links, num_host)),
      num_ids_(ends_.back()),
      records_(num_ids_ + kNumPlaces * kNumWorths),
      tenancy_(tenancy),
      house_extents_(tenancy.house ? tenancy.house->num_extents() : 0) {
    for (int i = 0; i < kNumPlaces; ++i) {
        const Place place = static_cast<Place>(i);
        const int size = ends_[i] - first_of(place);
        free_.emplace_back(std::max(1, size));
        for (int worth = 0; worth < kNumWorths; ++worth) {
            const BlockId end = sentinel(place, static_cast<Worth>(worth));
            records_[end].newer = records_[end].older = end;
            records_[end].list = static_cast<uint8_t>(cached_lists_.size());
            cached_lists_.push_back({end});
        }
        counts_[i][static_cast<int>(BlockState::kAbsent)] = size;
    }

    for (const Link& link : lend_links) {
        const std::vector<int> whole(link.num_extents, link.blocks_per_extent);
        lend_links_.push_back({link, whole, std::vector<int>(link.num_extents), FreeSet(std::max(1, link.num_extents)),
                               std::vector<bool>(link.num_extents)});
    }
    BlockId first = num_local;
    for (const Link& link : borrow_links) {
        borrow_links_.push_back({link,
                                 first,
                                 std::vector<Tenure>(link.num_extents, Tenure::kNone),
                                 std::vector<int>(link.num_extents),
                                 {}});
        first += link.num_extents * link.blocks_per_extent;
    }
    for (BlockId b = 0; b < num_local && !tenancy_.house; ++b) move_to(b, BlockState::kFree);
}

// Changes the state of a block, and with it every list and count. No other function changes a state.
void BlockPool::move_to(BlockId block, BlockState state) {
    Record& moved = record(block);
    if (moved.state == state) return;
    ++num_moves_;
    const int where = static_cast<int>(place(block));
    if (moved.state == BlockState::kFree) free_[where].erase(block - first_of(static_cast<Place>(where)));
    if (moved.state == BlockState::kCached) {
        if (last_of_oldest_open_ != kNone && block != oldest_cached(Place::kLocal)) last_of_oldest_open_ = kNone;
        unlink(block);
    }
    if (where == 0) count_extents(block, moved.state, -1);
    --counts_[where][static_cast<int>(moved.state)];

    const BlockState before = std::exchange(moved.state, state);
    ++counts_[where][static_cast<int>(state)];
    if (where == 0) count_extents(block, state, +1);
    if (state == BlockState::kFree) free_[where].insert(block - first_of(static_cast<Place>(where)));
    if (state == BlockState::kCached) link_newest(block);
    if (where == 0 && tenancy_.house) count_in_house(block, before, state);
}

void BlockPool::count_extents(BlockId local, BlockState state, int by) {
    for (LendLink& lend : lend_links_) {
        const int extent = local / lend.link.blocks_per_extent;
        if (extent >= lend.link.num_extents) continue;
        const bool was_clean = lend.num_occupied[extent] == 0 && lend.num_cached[extent] == 0;
        if (!is_reclaimable(state)) lend.num_occupied[extent] += by;
        if (state == BlockState::kCached) lend.num_cached[extent] += by;
        const bool is_clean = lend.num_occupied[extent] == 0 && lend.num_cached[extent] == 0;
        if (is_clean && !was_clean) lend.clean.insert(extent);
        if (was_clean && !is_clean) lend.clean.erase(extent);
    }
}

BlockId BlockPool::take(Place where) {
    const int lowest = free_[static_cast<int>(where)].lowest();
    if (lowest < 0) return kNone;
    return take(lowest + first_of(where));
}

BlockId BlockPool::take(BlockId free) {
    ensure(state(free) == BlockState::kFree, "a block that is taken is free");
    move_to(free, BlockState::kUsed);
    records_[free].refs = 1;
    return free;
}

void BlockPool::add_ref(BlockId block) {
    Record& held = record(block);
    ensure(held.refs > 0 || held.node != kNone, "a block that gets a reference is in use or in the prefix index");
    ++held.refs;
    move_to(block, BlockState::kUsed);
}

void BlockPool::drop_ref(BlockId block) {
    Record& held = record(block);
    ensure(held.refs > 0, "a reference that is dropped was held");
    if (--held.refs == 0) rest(block);
}

void BlockPool::undo_ref(BlockId block) {
    const Record before = record(block);
    const int64_t num_room_changes = num_room_changes_;
    drop_ref(block);
    num_room_changes_ = num_room_changes;  // the room is that of before
    if (before.refs > 1 || state(block) != BlockState::kCached) return;
    unlink(block);
    records_[block].cached_at = before.cached_at;
    link_before(before.newer, block, before.is_seen);
}

void BlockPool::rest(BlockId block) {
    ++num_room_changes_;
    if (records_[block].busy_until > 0) {
        move_to(block, BlockState::kInFlight);
    } else if (node(block) != kNone) {
        move_to(block, is_leaving(block) ? BlockState::kLeaving : BlockState::kCached);
    } else {
        release(block);
    }
}

void BlockPool::retire(BlockId block) {
    if (refs(block) == 1) set_busy(block);
    drop_ref(block);
}

void BlockPool::set_busy(BlockId block) {
    if (std::exchange(record(block).busy_until, num_begun_) == 0) busy_.push_back(block);
}

void BlockPool::settle() {
    ++num_settled_;
    ensure(num_settled_ <= num_begun_, "a step that settles was begun");
    std::erase_if(busy_, [&](BlockId block) {
        if (records_[block].busy_until > num_settled_) return false;
        records_[block].busy_until = 0;
        if (state(block) == BlockState::kInFlight) rest(block);
        num_room_changes_ += tenancy_.house != nullptr;  // the block may be moved again
        return true;
    });
    settle_kept_extents();
}

void BlockPool::forget(BlockId block) {
    record(block).node = kNone;
    record(block).worth = Worth::kNone;
    if (state(block) == BlockState::kCached || state(block) == BlockState::kLeaving) release(block);
}

void BlockPool::replace(BlockId from, BlockId to) {
    ensure(state(to) == BlockState::kUsed && refs(to) == 1 && node(to) == kNone, "a block moves to one just taken");
    Record &source = record(from), &target = record(to);
    ensure(source.refs > 0 || source.node != kNone, "a block that moves is in use or in the prefix index");
    target.node = std::exchange(source.node, kNone);
    target.refs = std::exchange(source.refs, 0);
    target.worth = std::exchange(source.worth, Worth::kNone);
    set_busy(to);
    if (target.refs == 0) rest(to);
    if (place(from) == Place::kLocal) {
        move_to(from, BlockState::kFree);
    } else {
        set_busy(from);
        rest(from);
    }
}

void BlockPool::release(BlockId block) {
    if (place(block) == Place::kHost) {
        move_to(block, BlockState::kAbsent);
        unpinned_.push_back({chunk_of(block), num_begun_ > num_settled_ ? num_begun_ : 0});
    } else if (is_leaving(block)) {
        give_up(block);
    } else {
        move_to(block, BlockState::kFree);
    }
}

BlockId BlockPool::oldest_cached(Place where) const {
    if (num_cached(where) == 0) return kNone;
    BlockId end = sentinel(where, Worth::kNone);
    while (records_[end].newer == end) ++end;
    return records_[end].newer;
}

void BlockPool::link_newest(BlockId block) {
    records_[block].cached_at = tenancy_.house ? tenancy_.house->tick() : ++num_cachings_;
    link_before(sentinel(place(block), records_[block].worth), block);
}

void BlockPool::link_before(BlockId newer, BlockId block, bool is_seen) {
    const BlockId older = records_[newer].older;
    Record& linked = records_[block];
    linked.older = older;
    linked.newer = newer;
    records_[older].newer = block;
    records_[newer].older = block;
    linked.list = records_[newer].list;
    linked.is_seen = false;
    ++list_of(block).size;
    if (is_seen) mark_seen(list_of(block), block);
}

// The block may become the first of its list, before blocks that see_next() has seen. If it does not count as seen, no
// block of the list does.
void BlockPool::set_worth(BlockId block, Worth worth, bool is_seen) {
    Record& changed = record(block);
    const Worth before = std::exchange(changed.worth, worth);
    if (changed.state != BlockState::kCached || worth == before) return;
    last_of_oldest_open_ = kNone;
    unlink(block);
    const BlockId end = sentinel(place(block), worth);
    const bool goes_first = worth < before;
    if (goes_first && !is_seen) forget_seen(list_of(end));
    link_before(goes_first ? records_[end].newer : end, block, goes_first && is_seen);
}

void BlockPool::unlink(BlockId block) {
    const Record& record = records_[block];
    CachedList& list = list_of(block);
    --list.size;
    list.num_seen -= record.is_seen;
    if (list.last_seen == block) list.last_seen = record.older;
    records_[record.older].newer = record.newer;
    records_[record.newer].older = record.older;
}

// Marks a block as seen. It must be right after the seen blocks of its list, or among them.
void BlockPool::mark_seen(CachedList& list, BlockId block) {
    records_[block].is_seen = true;
    ++list.num_seen;
    if (list.last_seen == records_[block].older) list.last_seen = block;
}

void BlockPool::forget_seen(CachedList& list) {
    for (; list.num_seen > 0; --list.num_seen) {
        records_[list.last_seen].is_seen = false;
        list.last_seen = records_[list.last_seen].older;
    }
}

void BlockPool::forget_seen() {
    for (CachedList& list : cached_lists_) forget_seen(list);
}

// ---- loading ----

BlockId BlockPool::start_loading() {
    const BlockId block = free_[static_cast<int>(Place::kLocal)].lowest();
    if (block < 0) return kNone;
    move_to(block, BlockState::kLoading);
    return block;
}

void BlockPool::stop_loading(BlockId block) {
    ensure(state(block) == BlockState::kLoading, "a block that stops loading was loading");
    rest(block);
}

// ---- host memory ----

void BlockPool::start_loading(BlockId absent) {
    ensure(place(absent) == Place::kHost && state(absent) == BlockState::kAbsent, "a pinned chunk has no block yet");
    move_to(absent, BlockState::kLoading);
}

std::vector<int> BlockPool::take_unpinned() {
    std::vector<int> chunks;
    std::erase_if(unpinned_, [&](const UnpinnedChunk& unpinned) {
        if (unpinned.until > num_settled_) return false;
        chunks.push_back(unpinned.chunk);
        return true;
    });
    return chunks;
}

// ---- layer-stream cache ----

BlockId BlockPool::start_staging() {
    const BlockId block = free_[static_cast<int>(Place::kLocal)].highest_below(num_local_);
    if (block < 0) return kNone;
    start_staging(block);
    return block;
}

void BlockPool::start_staging(BlockId free) {
    ensure(state(free) == BlockState::kFree, "a block that begins to stage others is free");
    move_to(free, BlockState::kStaging);
    ++num_room_changes_;
}

void BlockPool::stop_staging(BlockId block) {
    ensure(state(block) == BlockState::kStaging, "a block that stops staging was staging");
    move_to(block, BlockState::kFree);
    ++num_room_changes_;
}

}  // namespace swiftkv
