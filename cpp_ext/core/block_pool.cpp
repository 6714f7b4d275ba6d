#include "block_pool.h"

#include "check.h"

namespace swiftkv {

BlockPool::BlockPool(int num_blocks) : slots_(num_blocks + 1) {
    free_.reserve(num_blocks);
    // Handed out in ascending order at first, so that runs of consecutive blocks are long.
    for (BlockId b = num_blocks - 1; b >= 0; --b) free_.push_back(b);
    slots_[sentinel()].newer = slots_[sentinel()].older = sentinel();
}

BlockId BlockPool::take_free() {
    assert(has_free());
    const BlockId block = free_.back();
    free_.pop_back();
    slots_[block].refs = 1;
    return block;
}

void BlockPool::add_ref(BlockId block) {
    Slot& slot = slots_[block];
    if (slot.refs++ == 0) unlink(block);
}

void BlockPool::drop_ref(BlockId block) {
    Slot& slot = slots_[block];
    assert(slot.refs > 0);
    if (--slot.refs > 0) return;
    if (slot.node == kNone) {
        free_.push_back(block);
    } else {
        link_newest(block);
    }
}

void BlockPool::retire(BlockId block) {
    assert(slots_[block].refs == 1 && slots_[block].node == kNone);
    slots_[block].refs = 0;
    in_flight_.push_back(block);
}

void BlockPool::settle() {
    free_.insert(free_.end(), in_flight_.begin(), in_flight_.end());
    in_flight_.clear();
}

BlockId BlockPool::oldest_cached() const {
    return num_cached_ == 0 ? kNone : slots_[sentinel()].newer;
}

void BlockPool::free_cached(BlockId block) {
    assert(slots_[block].refs == 0 && slots_[block].node != kNone);
    unlink(block);
    slots_[block].node = kNone;
    free_.push_back(block);
}

void BlockPool::link_newest(BlockId block) {
    const BlockId newest = slots_[sentinel()].older;
    slots_[block].older = newest;
    slots_[block].newer = sentinel();
    slots_[newest].newer = block;
    slots_[sentinel()].older = block;
    ++num_cached_;
}

void BlockPool::unlink(BlockId block) {
    const Slot& slot = slots_[block];
    slots_[slot.older].newer = slot.newer;
    slots_[slot.newer].older = slot.older;
    --num_cached_;
}

GroupStats BlockPool::stats() const {
    const int free = static_cast<int>(free_.size());
    const int in_flight = static_cast<int>(in_flight_.size());
    return {.free = free,
            .used = total() - free - num_cached_ - in_flight,
            .cached = num_cached_,
            .lent = 0,
            .in_flight = in_flight,
            .total = total()};
}

void BlockPool::check(const std::vector<int>& refs) const {
    std::vector<int> states(total(), 0);
    for (BlockId b : free_) {
        check_that(slots_[b].refs == 0 && slots_[b].node == kNone, "a free block has no holder and no node");
        ++states[b];
    }
    for (BlockId b : in_flight_) {
        check_that(slots_[b].refs == 0 && slots_[b].node == kNone, "a block in flight has no holder and no node");
        ++states[b];
    }
    int cached = 0;
    for (BlockId b = slots_[sentinel()].newer; b != sentinel(); b = slots_[b].newer) {
        check_that(slots_[b].refs == 0 && slots_[b].node != kNone, "a cached block has a node and no holder");
        check_that(slots_[slots_[b].newer].older == b, "the list of cached blocks is linked both ways");
        ++states[b];
        check_that(++cached <= total(), "the list of cached blocks ends");
    }
    check_that(cached == num_cached_, "cached blocks are counted");
    int used = 0;
    for (BlockId b = 0; b < total(); ++b) {
        check_that(slots_[b].refs == refs[b], "references are what the requests hold");
        check_that(states[b] + (refs[b] > 0) == 1, "a block is in exactly one state");
        used += refs[b] > 0;
    }
    const GroupStats s = stats();
    check_that(s.used == used, "used blocks are counted");
    check_that(s.free + s.used + s.cached + s.lent + s.in_flight == s.total, "the pool equation");
}

}  // namespace swiftkv
