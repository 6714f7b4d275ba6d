#include "block_pool.h"

#include <algorithm>
#include <utility>

#include "check.h"

namespace swiftkv {

namespace {

bool is_reclaimable(BlockState state) {
    return state == BlockState::kFree || state == BlockState::kCached;
}

int count_ids(int num_local, const std::vector<Link>& borrow_links) {
    int ids = num_local;
    for (const Link& link : borrow_links) ids += link.num_extents * link.blocks_per_extent;
    return ids;
}

}  // namespace

BlockPool::BlockPool(int num_local, const std::vector<Link>& lend_links, const std::vector<Link>& borrow_links)
    : num_local_(num_local), slots_(count_ids(num_local, borrow_links) + 2) {
    free_.emplace_back(std::max(1, num_local));
    free_.emplace_back(std::max(1, num_ids() - num_local));
    for (const Place place : {Place::kLocal, Place::kBorrowed})
        slots_[sentinel(place)].newer = slots_[sentinel(place)].older = sentinel(place);
    counts_[0][static_cast<int>(BlockState::kAbsent)] = num_local;
    counts_[1][static_cast<int>(BlockState::kAbsent)] = num_ids() - num_local;

    for (const Link& link : lend_links) {
        const std::vector<int> whole(link.num_extents, link.blocks_per_extent);
        lend_links_.push_back(
            {link, whole, std::vector<int>(link.num_extents), FreeSet(std::max(1, link.num_extents))});
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
    for (BlockId b = 0; b < num_local; ++b) move_to(b, BlockState::kFree);
}

// The one place where a block changes its state, and with it every list and count.
void BlockPool::move_to(BlockId block, BlockState state) {
    Slot& slot = slots_[block];
    if (slot.state == state) return;
    const int where = static_cast<int>(place(block));
    if (slot.state == BlockState::kFree) free_set(block).erase(index_in_place(block));
    if (slot.state == BlockState::kCached) unlink(block);
    if (where == 0) count_extents(block, slot.state, -1);
    --counts_[where][static_cast<int>(slot.state)];

    slot.state = state;
    ++counts_[where][static_cast<int>(state)];
    if (where == 0) count_extents(block, state, +1);
    if (state == BlockState::kFree) free_set(block).insert(index_in_place(block));
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
    const BlockId block = lowest + (where == Place::kLocal ? 0 : num_local_);
    move_to(block, BlockState::kUsed);
    slots_[block].refs = 1;
    return block;
}

void BlockPool::add_ref(BlockId block) {
    ++slots_[block].refs;
    move_to(block, BlockState::kUsed);
}

void BlockPool::drop_ref(BlockId block) {
    assert(refs(block) > 0);
    if (--slots_[block].refs == 0) rest(block);
}

void BlockPool::rest(BlockId block) {
    if (slots_[block].busy_until > 0) {
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
    if (std::exchange(slots_[block].busy_until, num_begun_) == 0) busy_.push_back(block);
}

void BlockPool::settle() {
    ++num_settled_;
    std::erase_if(busy_, [&](BlockId block) {
        if (slots_[block].busy_until > num_settled_) return false;
        slots_[block].busy_until = 0;
        if (state(block) == BlockState::kInFlight) rest(block);
        return true;
    });
}

void BlockPool::forget(BlockId block) {
    slots_[block].node = kNone;
    if (state(block) == BlockState::kCached || state(block) == BlockState::kLeaving) release(block);
}

void BlockPool::replace(BlockId from, BlockId to) {
    assert(state(to) == BlockState::kUsed && refs(to) == 1 && node(to) == kNone);
    slots_[to].node = slots_[from].node;
    slots_[to].refs = slots_[from].refs;
    slots_[from].node = kNone;
    slots_[from].refs = 0;
    set_busy(to);
    if (slots_[to].refs == 0) rest(to);
    if (place(from) == Place::kLocal) {
        move_to(from, BlockState::kFree);
    } else {
        set_busy(from);
        rest(from);
    }
}

void BlockPool::release(BlockId block) {
    if (place(block) == Place::kBorrowed && is_leaving(block)) {
        give_up(block);
    } else {
        move_to(block, BlockState::kFree);
    }
}

BlockId BlockPool::oldest_cached(Place where) const {
    return num_cached(where) == 0 ? kNone : slots_[sentinel(where)].newer;
}

void BlockPool::link_newest(BlockId block) {
    const BlockId end = sentinel(place(block));
    const BlockId newest = slots_[end].older;
    slots_[block].older = newest;
    slots_[block].newer = end;
    slots_[newest].newer = block;
    slots_[end].older = block;
}

void BlockPool::unlink(BlockId block) {
    const Slot& slot = slots_[block];
    slots_[slot.older].newer = slot.newer;
    slots_[slot.newer].older = slot.older;
}

// ---- layer-stream cache ----

BlockId BlockPool::start_streaming() {
    const BlockId block = free_[static_cast<int>(Place::kLocal)].highest_below(num_local_);
    if (block < 0) return kNone;
    move_to(block, BlockState::kStreaming);
    return block;
}

void BlockPool::stop_streaming(BlockId block) {
    assert(state(block) == BlockState::kStreaming);
    move_to(block, BlockState::kFree);
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
    for (BlockId b = slots_[end].newer; b != end && static_cast<int>(found.size()) < max_extents; b = slots_[b].newer) {
        const int extent = b / lend.link.blocks_per_extent;
        if (extent >= lend.link.num_extents || lend.num_pinned[extent] > 0 || is_found[extent]) continue;
        is_found[extent] = true;
        found.push_back(extent);
    }
    return found;
}

void BlockPool::lend(int lend_link, int extent) {
    const BlockId first = first_block(lend_link, extent);
    for (BlockId b = first; b < first + blocks_per_extent(lend_link); ++b) {
        assert(state(b) == BlockState::kFree);
        move_to(b, BlockState::kLent);
    }
}

void BlockPool::take_back(int lend_link, int extent) {
    const BlockId first = first_block(lend_link, extent);
    for (BlockId b = first; b < first + blocks_per_extent(lend_link); ++b) {
        assert(state(b) == BlockState::kLent);
        move_to(b, BlockState::kFree);
    }
}

// ---- borrowing ----

const BlockPool::BorrowLink& BlockPool::borrow_link_of(BlockId borrowed) const {
    assert(place(borrowed) == Place::kBorrowed);
    return *std::prev(std::find_if(borrow_links_.begin(), borrow_links_.end(),
                                   [&](const BorrowLink& link) { return link.first > borrowed; }));
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

void BlockPool::borrow(int borrow_link, int extent) {
    BorrowLink& link = borrow_links_[borrow_link];
    assert(link.tenure[extent] == Tenure::kNone && link.num_present[extent] == 0);
    link.tenure[extent] = Tenure::kHeld;
    link.num_present[extent] = link.link.blocks_per_extent;
    num_held_blocks_ += link.link.blocks_per_extent;
    const BlockId first = link.first + extent * link.link.blocks_per_extent;
    for (BlockId b = first; b < first + link.link.blocks_per_extent; ++b) move_to(b, BlockState::kFree);
}

void BlockPool::recall(int borrow_link, int extent) {
    BorrowLink& link = borrow_links_[borrow_link];
    assert(link.tenure[extent] == Tenure::kHeld);
    link.tenure[extent] = Tenure::kRecalled;
    num_held_blocks_ -= link.link.blocks_per_extent;
    num_draining_ += link.num_present[extent];
    const BlockId first = link.first + extent * link.link.blocks_per_extent;
    for (BlockId b = first; b < first + link.link.blocks_per_extent; ++b) {
        if (state(b) == BlockState::kFree) give_up(b);
        if (state(b) == BlockState::kCached) move_to(b, BlockState::kLeaving);
    }
}

void BlockPool::lose(int borrow_link) {
    BorrowLink& link = borrow_links_[borrow_link];
    link.returned.clear();
    for (int extent = 0; extent < link.link.num_extents; ++extent) {
        Tenure& tenure = link.tenure[extent];
        if (tenure == Tenure::kHeld) num_held_blocks_ -= link.link.blocks_per_extent;
        if (tenure == Tenure::kRecalled) num_draining_ -= link.num_present[extent];
        if (tenure != Tenure::kNone) tenure = Tenure::kLost;
        const BlockId first = link.first + extent * link.link.blocks_per_extent;
        for (BlockId b = first; b < first + link.link.blocks_per_extent; ++b) {
            assert(node(b) == kNone);
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

// ---- check ----

void BlockPool::check(const std::vector<int>& refs) const {
    decltype(counts_) counted{};
    for (BlockId b = 0; b < num_ids(); ++b) {
        const Slot& slot = slots_[b];
        const bool is_local = place(b) == Place::kLocal;
        ++counted[static_cast<int>(place(b))][static_cast<int>(slot.state)];
        check_that(slot.refs == refs[b], "references are what the requests hold");
        check_that((slot.refs > 0) == (slot.state == BlockState::kUsed), "a used block has holders, and no other");
        check_that(free_[is_local ? 0 : 1].contains(index_in_place(b)) == (slot.state == BlockState::kFree),
                   "free blocks are listed as free");
        switch (slot.state) {
            case BlockState::kCached:
                check_that(slot.node != kNone, "a cached block has a node");
                check_that(is_local || !is_leaving(b), "a cached block is in an extent that stays");
                break;
            case BlockState::kLeaving:
                check_that(slot.node != kNone, "a leaving block has a node");
                check_that(!is_local && is_leaving(b), "a leaving block is in a recalled extent");
                break;
            case BlockState::kUsed:
            case BlockState::kInFlight:
                break;
            default:
                check_that(slot.node == kNone, "a block that is neither used nor cached has no node");
        }
        check_that(!is_local || slot.state != BlockState::kAbsent, "a local block is present");
        check_that(is_local || (slot.state != BlockState::kLent && slot.state != BlockState::kStreaming),
                   "borrowed blocks are not lent on, nor slots");
        check_that(is_local || !is_leaving(b) || slot.state != BlockState::kFree,
                   "nothing is free in an extent that leaves");
    }
    check_that(counted == counts_, "blocks are counted by state");
    for (const Place where : {Place::kLocal, Place::kBorrowed}) {
        int listed = 0;
        const BlockId end = sentinel(where);
        for (BlockId b = slots_[end].newer; b != end; b = slots_[b].newer) {
            check_that(state(b) == BlockState::kCached && place(b) == where, "the list holds cached blocks");
            check_that(slots_[slots_[b].newer].older == b, "the list of cached blocks is linked both ways");
            check_that(++listed <= num_ids(), "the list of cached blocks ends");
        }
        check_that(listed == num_cached(where), "every cached block is in the list");
    }
    for (const LendLink& lend : lend_links_) {
        for (int extent = 0; extent < lend.link.num_extents; ++extent) {
            int pinned = 0, cached = 0;
            for (int i = 0; i < lend.link.blocks_per_extent; ++i) {
                const BlockState s = state(extent * lend.link.blocks_per_extent + i);
                pinned += !is_reclaimable(s);
                cached += s == BlockState::kCached;
            }
            check_that(pinned == lend.num_pinned[extent] && cached == lend.num_cached[extent], "extents are counted");
            check_that(lend.clean.contains(extent) == (pinned + cached == 0), "clean extents are listed");
        }
    }
    int held = 0, draining = 0;
    for (const BorrowLink& link : borrow_links_) {
        for (int extent = 0; extent < link.link.num_extents; ++extent) {
            int present = 0;
            for (int i = 0; i < link.link.blocks_per_extent; ++i)
                present += state(link.first + extent * link.link.blocks_per_extent + i) != BlockState::kAbsent;
            check_that(present == link.num_present[extent], "present blocks of an extent are counted");
            const Tenure tenure = link.tenure[extent];
            check_that((present == 0) == (tenure == Tenure::kNone), "an extent that is held has blocks");
            check_that(tenure != Tenure::kHeld || present == link.link.blocks_per_extent, "a held extent is whole");
            held += tenure == Tenure::kHeld ? present : 0;
            draining += tenure == Tenure::kRecalled ? present : 0;
        }
    }
    check_that(held == num_held_blocks_ && draining == num_draining_, "held and leaving blocks are counted");
    int num_busy = 0;
    for (BlockId b = 0; b < num_ids(); ++b) num_busy += slots_[b].busy_until > 0;
    check_that(num_busy == static_cast<int>(busy_.size()), "what is busy is listed once");
    for (BlockId b : busy_) {
        check_that(slots_[b].busy_until > num_settled_ && state(b) != BlockState::kAbsent, "what is busy is there");
        check_that(num_settled_ < num_begun_, "steps in progress keep blocks busy");
    }
}

}  // namespace swiftkv
