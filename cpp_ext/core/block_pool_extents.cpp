// The part of the pool that handles whole extents: shared between groups, lent and borrowed.
#include <algorithm>
#include <utility>

#include "../common/check.h"
#include "block_pool.h"

namespace swiftkv {

// ---- a house ----

// Updates the counts of the block's extent. An extent whose blocks are all free goes back to the house.
void BlockPool::count_in_house(BlockId local, BlockState before, BlockState after) {
    const auto is_occupied = [](BlockState state) {
        return state != BlockState::kFree && state != BlockState::kCached && state != BlockState::kAbsent;
    };
    HouseExtent& extent = house_extents_[house_extent(local)];
    const bool was_open = is_open(house_extent(local));
    extent.num_occupied += is_occupied(after) - is_occupied(before);
    extent.num_cached += (after == BlockState::kCached) - (before == BlockState::kCached);
    const bool opens = is_open(house_extent(local)) && !was_open;
    num_open_ += is_open(house_extent(local)) - was_open;
    if (opens || is_in_oldest_open(local)) last_of_oldest_open_ = kNone;
    const bool is_freed = after == BlockState::kFree && before != BlockState::kAbsent;
    if (is_freed && is_empty(house_extent(local))) leave(house_extent(local));
}

bool BlockPool::is_empty(ExtentId extent) const {
    const HouseExtent& held = house_extents_[extent];
    return held.num_occupied + held.num_cached + held.num_kept == 0;
}

void BlockPool::keep_extent_of(BlockId local) {
    if (!tenancy_.house) return;
    const ExtentId extent = house_extent(local);
    num_open_ -= is_open(extent);
    ++house_extents_[extent].num_kept;
    kept_extents_.push_back({extent, num_begun_});
    last_of_oldest_open_ = kNone;
}

void BlockPool::settle_kept_extents() {
    std::erase_if(kept_extents_, [&](const KeptExtent& kept) {
        if (kept.until > num_settled_) return false;
        --house_extents_[kept.extent].num_kept;
        num_open_ += is_open(kept.extent);
        last_of_oldest_open_ = kNone;
        ++num_room_changes_;
        ++num_moves_;
        if (is_empty(kept.extent)) leave(kept.extent);
        return true;
    });
}

int BlockPool::num_used_alone(ExtentId extent) const {
    const HouseExtent& held = house_extents_[extent];
    if (held.num_kept > 0) return 0;
    int num_used = 0;
    for (BlockId b = extent * house_extent_blocks(); b < (extent + 1) * house_extent_blocks(); ++b) {
        if (is_busy(b)) return 0;
        num_used += state(b) == BlockState::kUsed;
    }
    return num_used == held.num_occupied ? num_used : 0;
}

void BlockPool::enter(ExtentId extent) {
    HouseExtent& entered = house_extents_[extent];
    ensure(!entered.is_held, "an extent that a group enters was not its own");
    entered.is_held = true;
    ++num_open_;
    const BlockId first = extent * house_extent_blocks();
    for (BlockId b = first; b < first + house_extent_blocks(); ++b) move_to(b, BlockState::kFree);
}

void BlockPool::leave(ExtentId extent) {
    const BlockId first = extent * house_extent_blocks();
    for (BlockId b = first; b < first + house_extent_blocks(); ++b) move_to(b, BlockState::kAbsent);
    house_extents_[extent].is_held = false;
    --num_open_;
    tenancy_.house->give_back(tenancy_.group, extent);
}

BlockId BlockPool::free_beside_used(ExtentId extent) const {
    const FreeSet& free = free_[static_cast<int>(Place::kLocal)];
    BlockId found = kNone;
    for (BlockId b = free.highest_below(num_local_); b != kNone; b = free.highest_below(b))
        if (is_beside_used(b, extent)) found = b;
    return found;
}

BlockId BlockPool::oldest_cached_beside_used(ExtentId extent) const {
    for (int worth = 0; worth < kNumWorths; ++worth) {
        const BlockId end = sentinel(Place::kLocal, static_cast<Worth>(worth));
        for (BlockId b = records_[end].newer; b != end; b = records_[b].newer)
            if (is_beside_used(b, extent)) return b;
    }
    return kNone;
}

// Remembers the result, because requests that make room ask for it at every block. It holds until a block of that
// extent changes, another extent opens, or a block other than the next to be evicted leaves the order.
BlockId BlockPool::last_of_oldest_open() const {
    if (last_of_oldest_open_ == kNone && num_open_ > 0) last_of_oldest_open_ = find_last_of_oldest_open();
    return last_of_oldest_open_;
}

BlockId BlockPool::find_last_of_oldest_open() const {
    std::vector<int> num_seen(house_extents_.size());
    for (int worth = 0; worth < kNumWorths; ++worth) {
        const BlockId end = sentinel(Place::kLocal, static_cast<Worth>(worth));
        for (BlockId b = records_[end].newer; b != end; b = records_[b].newer) {
            const ExtentId extent = house_extent(b);
            if (is_open(extent) && ++num_seen[extent] == house_extents_[extent].num_cached) return b;
        }
    }
    return kNone;
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
    for (int worth = 0; worth < kNumWorths; ++worth) {
        const BlockId end = sentinel(Place::kLocal, static_cast<Worth>(worth));
        for (BlockId b = records_[end].newer; b != end && static_cast<int>(found.size()) < max_extents;
             b = records_[b].newer) {
            const int extent = b / lend.link.blocks_per_extent;
            if (extent >= lend.link.num_extents || lend.num_occupied[extent] > 0 || is_found[extent]) continue;
            is_found[extent] = true;
            found.push_back(extent);
        }
    }
    return found;
}

void BlockPool::lend(int lend_link, int extent) noexcept {
    const BlockId first = first_block(lend_link, extent);
    for (BlockId b = first; b < first + blocks_per_extent(lend_link); ++b) {
        ensure(state(b) == BlockState::kFree, "a block that is lent was free");
        move_to(b, BlockState::kLent);
    }
    lend_links_[lend_link].is_lent[extent] = true;
}

void BlockPool::take_back(int lend_link, int extent) noexcept {
    const BlockId first = first_block(lend_link, extent);
    for (BlockId b = first; b < first + blocks_per_extent(lend_link); ++b) {
        ensure(state(b) == BlockState::kLent, "a block that is taken back was lent");
        move_to(b, BlockState::kFree);
    }
    lend_links_[lend_link].is_lent[extent] = false;
    num_room_changes_ += blocks_per_extent(lend_link);
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
    if (place(block) != Place::kPeer) return false;
    const BorrowLink& link = borrow_link_of(block);
    return link.tenure[extent_of(link, block)] != Tenure::kHeld;
}

bool BlockPool::is_lost(BlockId block) const {
    if (place(block) != Place::kPeer) return false;
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
    ensure(link.tenure[extent] == Tenure::kNone && link.num_present[extent] == 0,
           "an extent that is borrowed was not held");
    link.tenure[extent] = Tenure::kHeld;
    link.num_present[extent] = link.link.blocks_per_extent;
    num_held_blocks_ += link.link.blocks_per_extent;
    const BlockId first = link.first + extent * link.link.blocks_per_extent;
    for (BlockId b = first; b < first + link.link.blocks_per_extent; ++b) move_to(b, BlockState::kFree);
    num_room_changes_ += link.link.blocks_per_extent;
}

void BlockPool::recall(int borrow_link, int extent) noexcept {
    BorrowLink& link = borrow_links_[borrow_link];
    ensure(link.tenure[extent] == Tenure::kHeld, "an extent that is recalled is held");
    link.tenure[extent] = Tenure::kRecalled;
    num_held_blocks_ -= link.link.blocks_per_extent;
    ++num_moves_;
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
    ++num_moves_;
    for (int extent = 0; extent < link.link.num_extents; ++extent) {
        Tenure& tenure = link.tenure[extent];
        if (tenure == Tenure::kHeld) num_held_blocks_ -= link.link.blocks_per_extent;
        if (tenure == Tenure::kRecalled) num_draining_ -= link.num_present[extent];
        if (tenure != Tenure::kNone) tenure = Tenure::kLost;
        const BlockId first = link.first + extent * link.link.blocks_per_extent;
        for (BlockId b = first; b < first + link.link.blocks_per_extent; ++b) {
            ensure(node(b) == kNone, "a lost block is not in the prefix index");
            if (state(b) == BlockState::kFree) give_up(b);
        }
    }
}

// Makes a block of a recalled or lost extent absent. The last block of a recalled extent returns the extent.
void BlockPool::give_up(BlockId borrowed) {
    BorrowLink& link = borrow_link_of(borrowed);
    const int extent = extent_of(link, borrowed);
    move_to(borrowed, BlockState::kAbsent);
    const bool is_lost = link.tenure[extent] == Tenure::kLost;
    if (!is_lost) --num_draining_;
    ensure(num_draining_ >= 0 && link.num_present[extent] > 0, "a block that becomes absent was present");
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
