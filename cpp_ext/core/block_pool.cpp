#include "block_pool.h"

#include <algorithm>
#include <utility>

#include "../common/check.h"

namespace swiftkv {

namespace {

bool is_reclaimable(BlockState state) {
    return state == BlockState::kFree || state == BlockState::kCached;
}

// One past the last block of each place.
std::array<BlockId, kNumPlaces> ends_of_places(int num_local, const std::vector<Link>& borrow_links) {
    std::array<BlockId, kNumPlaces> ends{num_local};
    for (const Link& link : borrow_links)
        ends[static_cast<int>(link.place)] += link.num_extents * link.blocks_per_extent;
    for (int place = 1; place < kNumPlaces; ++place) ends[place] += ends[place - 1];
    return ends;
}

}  // namespace

BlockPool::BlockPool(int num_local, const std::vector<Link>& lend_links, const std::vector<Link>& borrow_links)
    : num_local_(num_local),
      ends_(ends_of_places(num_local, borrow_links)),
      num_ids_(ends_.back()),
      records_(num_ids_ + kNumPlaces) {
    for (int i = 0; i < kNumPlaces; ++i) {
        const Place place = static_cast<Place>(i);
        const int size = ends_[i] - first_of(place);
        free_.emplace_back(std::max(1, size));
        records_[sentinel(place)].newer = records_[sentinel(place)].older = sentinel(place);
        counts_[i][static_cast<int>(BlockState::kAbsent)] = size;
    }

    for (const Link& link : lend_links) {
        const std::vector<int> whole(link.num_extents, link.blocks_per_extent);
        lend_links_.push_back({link, whole, std::vector<int>(link.num_extents), FreeSet(std::max(1, link.num_extents)),
                               std::vector<bool>(link.num_extents)});
    }
    std::array<BlockId, kNumPlaces> next{};
    std::copy(ends_.begin(), ends_.end() - 1, next.begin() + 1);
    for (const Link& link : borrow_links) {
        BlockId& first = next[static_cast<int>(link.place)];
        borrow_links_.push_back({link,
                                 first,
                                 std::vector<Tenure>(link.num_extents, Tenure::kNone),
                                 std::vector<int>(link.num_extents),
                                 {}});
        first += link.num_extents * link.blocks_per_extent;
    }
    for (BlockId b = 0; b < num_local; ++b) move_to(b, BlockState::kFree);
}

// The one place where a block changes its state, and with it every list and count.
void BlockPool::move_to(BlockId block, BlockState state) {
    Record& moved = record(block);
    if (moved.state == state) return;
    const int where = static_cast<int>(place(block));
    if (moved.state == BlockState::kFree) free_[where].erase(block - first_of(static_cast<Place>(where)));
    if (moved.state == BlockState::kCached) unlink(block);
    if (where == 0) count_extents(block, moved.state, -1);
    --counts_[where][static_cast<int>(moved.state)];

    moved.state = state;
    ++counts_[where][static_cast<int>(state)];
    if (where == 0) count_extents(block, state, +1);
    if (state == BlockState::kFree) free_[where].insert(block - first_of(static_cast<Place>(where)));
    if (state == BlockState::kCached) link_newest(block);
}

void BlockPool::count_extents(BlockId local, BlockState state, int by) {
    for (LendLink& lend : lend_links_) {
        const int extent = local / lend.link.blocks_per_extent;
        if (extent >= lend.link.num_extents) continue;
        const bool was_clean = lend.num_pinned[extent] == 0 && lend.num_cached[extent] == 0;
        if (!is_reclaimable(state)) lend.num_pinned[extent] += by;
        if (state == BlockState::kCached) lend.num_cached[extent] += by;
        const bool is_clean = lend.num_pinned[extent] == 0 && lend.num_cached[extent] == 0;
        if (is_clean && !was_clean) lend.clean.insert(extent);
        if (was_clean && !is_clean) lend.clean.erase(extent);
    }
}

BlockId BlockPool::take(Place where) {
    const int lowest = free_[static_cast<int>(where)].lowest();
    if (lowest < 0) return kNone;
    const BlockId block = lowest + first_of(where);
    move_to(block, BlockState::kUsed);
    records_[block].refs = 1;
    return block;
}

void BlockPool::add_ref(BlockId block) {
    Record& held = record(block);
    ensure(held.refs > 0 || held.node != kNone, "who comes to a block finds it in use or in the prefix index");
    ++held.refs;
    move_to(block, BlockState::kUsed);
}

void BlockPool::drop_ref(BlockId block) {
    Record& held = record(block);
    ensure(held.refs > 0, "who leaves a block was its holder");
    if (--held.refs == 0) rest(block);
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
        return true;
    });
}

void BlockPool::forget(BlockId block) {
    record(block).node = kNone;
    if (state(block) == BlockState::kCached || state(block) == BlockState::kLeaving) release(block);
}

void BlockPool::replace(BlockId from, BlockId to) {
    ensure(state(to) == BlockState::kUsed && refs(to) == 1 && node(to) == kNone, "a block moves to one just taken");
    Record &source = record(from), &target = record(to);
    ensure(source.refs > 0 || source.node != kNone, "a block that moves is in use or in the prefix index");
    target.node = std::exchange(source.node, kNone);
    target.refs = std::exchange(source.refs, 0);
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
    if (place(block) != Place::kLocal && is_leaving(block)) {
        give_up(block);
    } else {
        move_to(block, BlockState::kFree);
    }
}

BlockId BlockPool::oldest_cached(Place where) const {
    return num_cached(where) == 0 ? kNone : records_[sentinel(where)].newer;
}

BlockId BlockPool::oldest_cached_below(Place where) const {
    BlockId oldest = kNone;
    for (int place = static_cast<int>(where) + 1; place < kNumPlaces; ++place) {
        const BlockId cached = oldest_cached(static_cast<Place>(place));
        if (cached == kNone) continue;
        const auto is_older = [&](BlockId a, BlockId b) {
            return static_cast<int32_t>(records_[a].cached_at - records_[b].cached_at) < 0;
        };
        if (oldest == kNone || is_older(cached, oldest)) oldest = cached;
    }
    return oldest;
}

void BlockPool::link_newest(BlockId block) {
    const BlockId end = sentinel(place(block));
    const BlockId newest = records_[end].older;
    records_[block].older = newest;
    records_[block].newer = end;
    records_[block].cached_at = ++num_cachings_;
    records_[newest].newer = block;
    records_[end].older = block;
}

void BlockPool::unlink(BlockId block) {
    const Record& record = records_[block];
    records_[record.older].newer = record.newer;
    records_[record.newer].older = record.older;
}

// ---- loading ----

BlockId BlockPool::start_loading() {
    const BlockId block = free_[static_cast<int>(Place::kLocal)].lowest();
    if (block < 0) return kNone;
    move_to(block, BlockState::kLoading);
    return block;
}

void BlockPool::stop_loading(BlockId block) {
    ensure(state(block) == BlockState::kLoading, "what has been loaded was loading");
    rest(block);
}

// ---- layer-stream cache ----

BlockId BlockPool::start_staging() {
    const BlockId block = free_[static_cast<int>(Place::kLocal)].highest_below(num_local_);
    if (block < 0) return kNone;
    move_to(block, BlockState::kStaging);
    ++num_room_changes_;
    return block;
}

void BlockPool::stop_staging(BlockId block) {
    ensure(state(block) == BlockState::kStaging, "what leaves the layer-stream cache is of it");
    move_to(block, BlockState::kFree);
    ++num_room_changes_;
}

// ---- lending ----

std::vector<int> BlockPool::lendable(int lend_link, int max_extents, bool or_cached) const {
    const LendLink& lend = lend_links_[lend_link];
    std::vector<int> found;
    for (int e = lend.clean.highest_below(lend.link.num_extents); e >= 0; e = lend.clean.highest_below(e)) {
        if (static_cast<int>(found.size()) == max_extents) return found;
        found.push_back(e);
    }
    if (!or_cached) return found;
    std::vector<bool> is_found(lend.link.num_extents);
    const BlockId end = sentinel(Place::kLocal);
    for (BlockId b = records_[end].newer; b != end && static_cast<int>(found.size()) < max_extents;
         b = records_[b].newer) {
        const int extent = b / lend.link.blocks_per_extent;
        if (extent >= lend.link.num_extents || lend.num_pinned[extent] > 0 || is_found[extent]) continue;
        is_found[extent] = true;
        found.push_back(extent);
    }
    return found;
}

void BlockPool::lend(int lend_link, int extent) noexcept {
    const BlockId first = first_block(lend_link, extent);
    for (BlockId b = first; b < first + blocks_per_extent(lend_link); ++b) {
        ensure(state(b) == BlockState::kFree, "what is lent is free");
        move_to(b, BlockState::kLent);
    }
    lend_links_[lend_link].is_lent[extent] = true;
}

void BlockPool::take_back(int lend_link, int extent) noexcept {
    const BlockId first = first_block(lend_link, extent);
    for (BlockId b = first; b < first + blocks_per_extent(lend_link); ++b) {
        ensure(state(b) == BlockState::kLent, "what comes home was lent");
        move_to(b, BlockState::kFree);
    }
    lend_links_[lend_link].is_lent[extent] = false;
    ++num_room_changes_;
}

void BlockPool::check_lent(int lend_link, std::span<const ExtentId> extents) const {
    const LendLink& lend = lend_links_[lend_link];
    check_extents(extents, lend.link.num_extents);
    for (const ExtentId extent : extents)
        if (!lend.is_lent[extent]) refuse_extent(extent, "is not lent");
}

// ---- borrowing ----

const BlockPool::BorrowLink& BlockPool::borrow_link_of(BlockId borrowed) const {
    const auto found = std::find_if(borrow_links_.begin(), borrow_links_.end(), [&](const BorrowLink& link) {
        return borrowed >= link.first && borrowed < link.first + link.link.num_extents * link.link.blocks_per_extent;
    });
    ensure(found != borrow_links_.end(), "a borrowed block is one of a link's");
    return *found;
}

BlockPool::BorrowLink& BlockPool::borrow_link_of(BlockId borrowed) {
    return const_cast<BorrowLink&>(std::as_const(*this).borrow_link_of(borrowed));
}

bool BlockPool::is_leaving(BlockId block) const {
    if (place(block) == Place::kLocal) return false;
    const BorrowLink& link = borrow_link_of(block);
    return link.tenure[extent_of(link, block)] != Tenure::kHeld;
}

bool BlockPool::is_lost(BlockId block) const {
    if (place(block) == Place::kLocal) return false;
    const BorrowLink& link = borrow_link_of(block);
    return link.tenure[extent_of(link, block)] == Tenure::kLost;
}

BlockPool::Location BlockPool::locate(BlockId borrowed, int64_t block_bytes) const {
    const BorrowLink& link = borrow_link_of(borrowed);
    const int extent = extent_of(link, borrowed);
    const int within = (borrowed - link.first) % link.link.blocks_per_extent;
    return {static_cast<int>(&link - borrow_links_.data()),
            link.link.base_offset_bytes + extent * link.link.extent_bytes + within * block_bytes};
}

void BlockPool::check_not_held(int borrow_link, std::span<const ExtentId> extents) const {
    const BorrowLink& link = borrow_links_[borrow_link];
    check_extents(extents, link.link.num_extents);
    for (const ExtentId extent : extents) {
        if (link.tenure[extent] == Tenure::kHeld) refuse_extent(extent, "is borrowed already");
        if (link.tenure[extent] == Tenure::kRecalled) refuse_extent(extent, "was recalled and has not been returned");
        if (link.tenure[extent] == Tenure::kLost)
            refuse_extent(extent, "was lost, and a step in progress still uses it");
    }
}

void BlockPool::check_held(int borrow_link, std::span<const ExtentId> extents) const {
    const BorrowLink& link = borrow_links_[borrow_link];
    check_extents(extents, link.link.num_extents);
    for (const ExtentId extent : extents)
        if (link.tenure[extent] != Tenure::kHeld) refuse_extent(extent, "is not held");
}

void BlockPool::borrow(int borrow_link, int extent) noexcept {
    BorrowLink& link = borrow_links_[borrow_link];
    ensure(link.tenure[extent] == Tenure::kNone && link.num_present[extent] == 0, "what is borrowed was not held");
    link.tenure[extent] = Tenure::kHeld;
    link.num_present[extent] = link.link.blocks_per_extent;
    num_held_blocks_ += link.link.blocks_per_extent;
    const BlockId first = link.first + extent * link.link.blocks_per_extent;
    for (BlockId b = first; b < first + link.link.blocks_per_extent; ++b) move_to(b, BlockState::kFree);
    ++num_room_changes_;
}

void BlockPool::recall(int borrow_link, int extent) noexcept {
    BorrowLink& link = borrow_links_[borrow_link];
    ensure(link.tenure[extent] == Tenure::kHeld, "what is recalled is held");
    link.tenure[extent] = Tenure::kRecalled;
    num_held_blocks_ -= link.link.blocks_per_extent;
    num_draining_ += link.num_present[extent];
    const BlockId first = link.first + extent * link.link.blocks_per_extent;
    for (BlockId b = first; b < first + link.link.blocks_per_extent; ++b) {
        if (state(b) == BlockState::kFree) give_up(b);
        if (state(b) == BlockState::kCached) move_to(b, BlockState::kLeaving);
    }
}

void BlockPool::lose(int borrow_link) noexcept {
    BorrowLink& link = borrow_links_[borrow_link];
    link.returned.clear();
    for (int extent = 0; extent < link.link.num_extents; ++extent) {
        Tenure& tenure = link.tenure[extent];
        if (tenure == Tenure::kHeld) num_held_blocks_ -= link.link.blocks_per_extent;
        if (tenure == Tenure::kRecalled) num_draining_ -= link.num_present[extent];
        if (tenure != Tenure::kNone) tenure = Tenure::kLost;
        const BlockId first = link.first + extent * link.link.blocks_per_extent;
        for (BlockId b = first; b < first + link.link.blocks_per_extent; ++b) {
            ensure(node(b) == kNone, "the prefix index forgets what is lost");
            if (state(b) == BlockState::kFree) give_up(b);
        }
    }
}

// A block that is nobody's any more leaves with its extent; the last one takes the extent along.
void BlockPool::give_up(BlockId borrowed) {
    BorrowLink& link = borrow_link_of(borrowed);
    const int extent = extent_of(link, borrowed);
    move_to(borrowed, BlockState::kAbsent);
    const bool is_lost = link.tenure[extent] == Tenure::kLost;
    if (!is_lost) --num_draining_;
    ensure(num_draining_ >= 0 && link.num_present[extent] > 0, "a block that leaves was there");
    if (--link.num_present[extent] > 0) return;
    link.tenure[extent] = Tenure::kNone;
    if (!is_lost) link.returned.push_back(extent);
}

std::vector<int> BlockPool::take_returned(int borrow_link) {
    return std::exchange(borrow_links_[borrow_link].returned, {});
}

void BlockPool::for_each_leaving(const std::function<void(BlockId)>& visit) const {
    for (int i = 0; i < static_cast<int>(borrow_links_.size()); ++i)
        for_each_of_link(i, [&](BlockId block) {
            if (is_leaving(block)) visit(block);
        });
}

void BlockPool::for_each_of_link(int borrow_link, const std::function<void(BlockId)>& visit) const {
    const BorrowLink& link = borrow_links_[borrow_link];
    for (int extent = 0; extent < link.link.num_extents; ++extent) {
        if (link.num_present[extent] == 0) continue;
        const BlockId first = link.first + extent * link.link.blocks_per_extent;
        for (BlockId b = first; b < first + link.link.blocks_per_extent; ++b)
            if (state(b) != BlockState::kAbsent) visit(b);
    }
}

}  // namespace swiftkv
