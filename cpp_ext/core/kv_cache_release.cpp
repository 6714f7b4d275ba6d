// The part of the cache that releases blocks: tables let go of them, and steps that may use them settle.
#include <algorithm>

#include "../common/check.h"
#include "kv_cache.h"

namespace swiftkv {

// Removes a table's reference at the end of a step. The next step may have been planned with the block already.
void KvCache::let_go(int g, BlockId block) {
    if (num_steps_ > 1) {
        groups_[g].pool.retire(block);
    } else {
        groups_[g].pool.drop_ref(block);
    }
}

void KvCache::release_outside_window(BlockTable& table, int num_computed) {
    for (int g = 0; g < num_groups(); ++g) {
        if (groups_[g].spec.window == 0) continue;
        BlockTable::Group& held = table.groups[g];
        const int first_kept = num_computed / block_size_ - groups_[g].num_tail - 1;
        for (; held.first < first_kept; ++held.first) {
            let_go(g, block_of(g, held.entries[held.first]));
            held.entries[held.first] = kNoBlock;
        }
    }
}

void KvCache::trim(BlockTable& table, int num_tokens) {
    const int num_blocks = ceil_div(num_tokens, block_size_);
    for (int g = 0; g < num_groups(); ++g) {
        BlockTable::Group& held = table.groups[g];
        ensure(num_blocks >= std::max(held.first, table.num_committed), "blocks that are trimmed are not needed");
        for (; static_cast<int>(held.entries.size()) > num_blocks; held.entries.pop_back())
            let_go(g, block_of(g, held.entries.back()));
    }
}

void KvCache::release(BlockTable& table) {
    for (int g = 0; g < num_groups(); ++g) {
        BlockTable::Group& held = table.groups[g];
        // Last block first: see evict().
        for (int i = static_cast<int>(held.entries.size()) - 1; i >= held.first; --i)
            groups_[g].pool.drop_ref(block_of(g, held.entries[i]));
    }
    table = make_table();
}

void KvCache::put_back(BlockTable& table) {
    if (division_.is_shared()) return release(table);  // making room may have changed the order of eviction
    for (int g = 0; g < num_groups(); ++g) {
        BlockTable::Group& held = table.groups[g];
        for (int i = static_cast<int>(held.entries.size()) - 1; i >= held.first; --i)
            groups_[g].pool.undo_ref(block_of(g, held.entries[i]));
    }
    table = make_table();
}

void KvCache::retire(BlockTable& table) {
    for (int g = 0; g < num_groups(); ++g) {
        BlockTable::Group& held = table.groups[g];
        BlockPool& pool = groups_[g].pool;
        // Steps write to blocks that are not committed, and copies may touch any block if blocks are borrowed.
        for (int i = static_cast<int>(held.entries.size()) - 1; i >= held.first; --i) {
            const BlockId block = block_of(g, held.entries[i]);
            const bool is_touched = i >= table.num_committed || !borrow_links_.empty();
            if (is_touched) {
                pool.retire(block);
            } else {
                pool.drop_ref(block);
            }
        }
    }
    table = make_table();
}

void KvCache::begin_step() {
    ++num_steps_;
    local_moves_.clear();  // the previous step has its moves in its plan
    for (KvGroup& group : groups_) group.pool.begin_step();
}

void KvCache::cancel_step() {
    ensure(!has_copies() && num_steps_ > 0, "a step that is given up was begun, and copies nothing");
    --num_steps_;
    for (KvGroup& group : groups_) group.pool.cancel_step();
}

void KvCache::settle() {
    ensure(num_steps_ > 0, "a step that settles was begun");
    --num_steps_;
    for (KvGroup& group : groups_) {
        group.pool.settle();
        if (num_steps_ > 0) continue;  // the copies belong to the next step
        // Last block first: see evict().
        for (auto it = group.moves_up.rbegin(); it != group.moves_up.rend(); ++it) {
            group.pool.drop_ref(it->local);
            group.pool.note_unpinned(it->chunk);
        }
        group.moves_up.clear();
        group.num_unfreshed += group.num_fresh;
        group.num_fresh = 0;
        group.spills.clear();
        group.moves_in.clear();
        group.moves_across.clear();
        group.missing.clear();
    }
}

void KvCache::settle_failed() {
    for (int g = 0; g < num_groups(); ++g) {
        const auto forget = [&](BlockId block) {
            if (groups_[g].pool.node(block) != kNone) evict(g, block);
        };
        for (const BlockCopy& copy : groups_[g].spills) forget(copy.borrowed);
        for (const BlockCopy& copy : groups_[g].moves_in) forget(copy.local);
        for (const ChunkCopy& copy : groups_[g].moves_up) forget(copy.local);
        for (const BlockMove& move : groups_[g].moves_across) forget(move.to);
        for (const LocalMove& move : local_moves_)
            if (move.group == g) forget(move.to);
    }
    settle();
}

void KvCache::reset() {
    for (int g = 0; g < num_groups(); ++g) {
        const BlockPool& pool = groups_[g].pool;
        for (int place = 0; place < kNumPlaces; ++place)
            for (BlockId b; (b = pool.oldest_cached(static_cast<Place>(place))) != kNone;) evict(g, b);
        for (BlockId b = 0; has_loading() && b < pool.num_ids(); ++b)
            if (pool.state(b) == BlockState::kLoading && pool.node(b) != kNone) evict(g, b);
        for (BlockId b : leaving(g, BlockState::kLeaving))
            if (pool.state(b) == BlockState::kLeaving) evict(g, b);  // else evicted with another block of its node
    }
    if (events_.is_on() && resident_blocks().empty()) events_.cleared();
}

}  // namespace swiftkv
