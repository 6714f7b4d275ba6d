// The complete, slow check of all invariants between two calls, for tests.
#include <algorithm>

#include "../common/check.h"
#include "block_pool.h"
#include "kv_cache.h"
#include "prefix_index.h"

namespace swiftkv {

void BlockPool::check(const std::vector<int>& refs) const {
    check_blocks(refs);
    check_cached_lists();
    for (const LendLink& lend : lend_links_) check_lend_link(lend);
    check_borrow_links();
    if (tenancy_.house) check_house();
    check_busy();
}

void BlockPool::check_blocks(const std::vector<int>& refs) const {
    decltype(counts_) counted{};
    for (BlockId b = 0; b < num_ids(); ++b) {
        const Record& record = records_[b];
        const bool is_local = place(b) == Place::kLocal;
        ++counted[static_cast<int>(place(b))][static_cast<int>(record.state)];
        check_that(record.refs == refs[b], "a block has as many references as requests hold");
        check_that((record.refs > 0) == (record.state == BlockState::kUsed), "only a used block has references");
        check_that(
            free_[static_cast<int>(place(b))].contains(b - first_of(place(b))) == (record.state == BlockState::kFree),
            "free blocks are listed as free");
        switch (record.state) {
            case BlockState::kCached:
                check_that(record.node != kNone, "a cached block has a node");
                check_that(is_local || !is_leaving(b), "a cached block is in an extent that stays");
                break;
            case BlockState::kLeaving:
                check_that(record.node != kNone, "a leaving block has a node");
                check_that(!is_local && is_leaving(b), "a leaving block is in a recalled extent");
                break;
            case BlockState::kLoading:
                check_that(is_local || place(b) == Place::kHost, "no borrowed block is loading");
                break;
            case BlockState::kUsed:
            case BlockState::kInFlight:
                break;
            default:
                check_that(record.node == kNone, "a block that is neither used nor cached has no node");
                check_that(record.worth == Worth::kNone, "a block that is neither used nor cached is worth nothing");
        }
        check_that(!is_local || tenancy_.house || record.state != BlockState::kAbsent, "a local block is present");
        check_that(place(b) != Place::kHost || record.state != BlockState::kFree, "host memory is not ours to fill");
        check_that(is_local || (record.state != BlockState::kLent && record.state != BlockState::kStaging),
                   "borrowed blocks are not lent on, nor staged in");
        check_that(is_local || !is_leaving(b) || record.state != BlockState::kFree,
                   "no block is free in a recalled extent");
    }
    check_that(counted == counts_, "blocks are counted by state");
}

void BlockPool::check_cached_lists() const {
    for (int i = 0; i < kNumPlaces; ++i) {
        const Place where = static_cast<Place>(i);
        int listed = 0;
        for (int worth = 0; worth < kNumWorths; ++worth) {
            const BlockId end = sentinel(where, static_cast<Worth>(worth));
            const CachedList& list = cached_lists_[records_[end].list];
            const int before = listed;
            int num_seen = 0;
            BlockId last_seen = end;
            for (BlockId b = records_[end].newer; b != end; b = records_[b].newer) {
                check_that(state(b) == BlockState::kCached && place(b) == where, "the list holds cached blocks");
                check_that(static_cast<int>(records_[b].worth) == worth, "a list holds blocks of one worth");
                check_that(records_[records_[b].newer].older == b, "the list of cached blocks is linked both ways");
                check_that(++listed <= num_ids(), "the list of cached blocks ends");
                if (!records_[b].is_seen) continue;
                check_that(++num_seen == listed - before, "the seen blocks of a list come first");
                last_seen = b;
            }
            check_that(list.size == listed - before && list.num_seen == num_seen && list.last_seen == last_seen,
                       "a list knows its size, and its seen blocks");
        }
        check_that(listed == num_cached(where), "every cached block is in the list");
    }
}

void BlockPool::check_lend_link(const LendLink& lend) const {
    for (int extent = 0; extent < lend.link.num_extents; ++extent) {
        int occupied = 0, cached = 0, lent = 0;
        for (int i = 0; i < lend.link.blocks_per_extent; ++i) {
            const BlockState s = state(extent * lend.link.blocks_per_extent + i);
            occupied += s != BlockState::kFree && s != BlockState::kCached;
            cached += s == BlockState::kCached;
            lent += s == BlockState::kLent;
        }
        check_that(occupied == lend.num_occupied[extent] && cached == lend.num_cached[extent],
                   "the blocks of an extent are counted");
        check_that(lend.clean.contains(extent) == (occupied + cached == 0), "clean extents are listed");
        check_that(!lend.is_lent[extent] || lent == lend.link.blocks_per_extent, "an extent is lent whole");
    }
}

void BlockPool::check_borrow_links() const {
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
}

void BlockPool::check_house() const {
    int open = 0;
    for (ExtentId extent = 0; extent < tenancy_.house->num_extents(); ++extent) {
        int free = 0, cached = 0, absent = 0;
        for (int i = 0; i < house_extent_blocks(); ++i) {
            const BlockState s = state(extent * house_extent_blocks() + i);
            free += s == BlockState::kFree;
            cached += s == BlockState::kCached;
            absent += s == BlockState::kAbsent;
        }
        const int occupied = house_extent_blocks() - free - cached - absent;
        const HouseExtent& counted = house_extents_[extent];
        check_that(occupied == counted.num_occupied && cached == counted.num_cached,
                   "the extents of a house are counted");
        check_that(absent == (counted.is_held ? 0 : house_extent_blocks()),
                   "a group has all blocks of an extent or none");
        check_that(free < house_extent_blocks() || counted.num_kept > 0, "an extent that holds nothing has no owner");
        check_that(counted.is_held == (tenancy_.house->owner(extent) == tenancy_.group), "the house knows the owner");
        const auto is_here = [&](const KeptExtent& kept) { return kept.extent == extent; };
        check_that(counted.num_kept == std::count_if(kept_extents_.begin(), kept_extents_.end(), is_here),
                   "the reasons that keep an extent are listed");
        open += counted.is_held && occupied == 0 && counted.num_kept == 0;
    }
    check_that(open == num_open_, "open extents are counted");
    if (last_of_oldest_open_ != kNone)
        check_that(last_of_oldest_open_ == find_last_of_oldest_open(), "the oldest open extent is the one remembered");
}

void BlockPool::check_busy() const {
    int num_busy = 0;
    for (BlockId b = 0; b < num_ids(); ++b) num_busy += records_[b].busy_until > 0;
    check_that(num_busy == static_cast<int>(busy_.size()), "a busy block is listed once");
    for (BlockId b : busy_) {
        check_that(records_[b].busy_until > num_settled_ && state(b) != BlockState::kAbsent, "a busy block is present");
        check_that(num_settled_ < num_begun_, "steps in progress keep blocks busy");
    }
}

void PrefixIndex::check() const {
    size_t listed = 0;
    for_each([&](NodeId node) {
        check_that(find(nodes_[node].key) == node, "a key has one node, in its bucket");
        ++listed;
    });
    for (NodeId node = free_nodes_; node != kNone; node = nodes_[node].next) ++listed;
    check_that(listed == nodes_.size(), "every node is in a bucket or free");
}

void KvCache::check(std::span<const BlockTable* const> tables,
                    std::span<const std::vector<BlockKey>* const> keys) const {
    for (int g = 0; g < num_groups(); ++g) {
        const KvGroup& group = groups_[g];
        std::vector<int> refs(group.pool.num_ids(), 0);
        for (const BlockTable* table : tables)
            for (int32_t entry : table->groups[g].entries)
                if (entry != kNoBlock) ++refs[block_of(g, entry)];
        for (const ChunkCopy& copy : group.moves_up) ++refs[copy.local];
        for (const ChunkCopy& copy : group.coming)
            check_that(group.pool.state(copy.local) == BlockState::kLoading, "a block that will be copied is loading");
        group.pool.check(refs);
        const GroupStats s = stats()[g];
        check_that(s.free + s.used + s.cached + s.lent + s.in_flight + s.staging + s.loading + s.elsewhere == s.total,
                   "the pool equation");
        check_that(s.staging == static_cast<int>(group.staging.size()), "staging blocks are listed");
        for (BlockId block : group.staging)
            check_that(group.pool.state(block) == BlockState::kStaging, "a block that is listed as staging is staging");
    }
    for (size_t i = 0; i < tables.size(); ++i) check_table(*tables[i], *keys[i]);

    if (division_.is_shared()) division_.house()->check();
    index_.check();
    std::vector<int> indexed(groups_.size(), 0);
    index_.for_each([&](NodeId node) {
        check_that(!index_.is_empty(node), "a node holds a block");
        for (int g = 0; g < num_groups(); ++g) {
            const BlockId block = index_.block(node, g);
            check_that(block != kNone || groups_[g].spec.window > 0, "a node has all its full-attention blocks");
            if (block == kNone) continue;
            check_that(groups_[g].pool.node(block) == node, "a block in the index knows its node");
            ++indexed[g];
        }
    });
    check_boundaries();
    for (int g = 0; g < num_groups(); ++g) {
        int with_node = 0;
        for (BlockId b = 0; b < groups_[g].pool.num_ids(); ++b) with_node += groups_[g].pool.node(b) != kNone;
        check_that(with_node == indexed[g], "a block that knows a node is in the index");
    }
}

// Checks that every boundary that is kept can be used.
void KvCache::check_boundaries() const {
    boundaries_.check();
    boundaries_.for_each_on_path(
        [&](NodeId node) { check_that(!index_.is_empty(node), "a node on a path holds a block"); });
    boundaries_.for_each([&](std::span<const NodeId> nodes) {
        for (int i = 0; i < static_cast<int>(nodes.size()); ++i)
            for (int g = 0; g < num_groups(); ++g)
                check_that(!boundaries_.needs(g, i) || index_.block(nodes[i], g) != kNone, "a boundary has its tails");
    });
}

void KvCache::check_table(const BlockTable& table, const std::vector<BlockKey>& keys) const {
    for (int g = 0; g < num_groups(); ++g) {
        const BlockTable::Group& held = table.groups[g];
        const int size = static_cast<int>(held.entries.size());
        check_that(held.first <= size && table.num_committed <= size, "a table holds what it has committed");
        for (int i = 0; i < size; ++i) {
            check_that((held.entries[i] == kNoBlock) == (i < held.first),
                       "only entries before the window have no block");
            if (i < held.first || i >= table.num_committed) continue;
            const NodeId node = groups_[g].pool.node(block_of(g, held.entries[i]));
            check_that(node == kNone || node == index_.find(keys[i]), "a committed block has the node of its key");
        }
    }
}

}  // namespace swiftkv
