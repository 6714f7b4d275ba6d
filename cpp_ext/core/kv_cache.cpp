#include "kv_cache.h"

#include <algorithm>
#include <cassert>

#include "check.h"

namespace swiftkv {
namespace {

int count_blocks(const std::vector<GroupSpec>& groups) {
    int total = 0;
    for (const GroupSpec& g : groups) total += g.num_blocks;
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

KvCache::KvCache(std::vector<GroupSpec> groups, int block_size)
    : block_size_(block_size), tree_(static_cast<int>(groups.size()), count_blocks(groups)) {
    for (const GroupSpec& spec : groups) {
        groups_.push_back({spec, ceil_div(spec.window, block_size), BlockPool(spec.num_blocks)});
        has_full_attention_ |= spec.window == 0;
    }
}

int KvCache::match(std::span<const BlockKey> keys, std::vector<NodeId>& path) const {
    int usable = 0;
    // Length of the run of resident blocks that ends at the block looked at, per group.
    std::vector<int> run(groups_.size(), 0);
    tree_.find_each(keys, [&](size_t i, NodeId node) {
        const int length = static_cast<int>(i) + 1;
        if (node == kNone && has_full_attention_) return false;
        bool is_usable = true;
        for (int g = 0; g < num_groups(); ++g) {
            const bool is_resident = node != kNone && tree_.block(node, g) != kNone;
            run[g] = is_resident ? run[g] + 1 : 0;
            const int needed = groups_[g].spec.window == 0 ? length : std::min(length, groups_[g].window_blocks);
            is_usable &= run[g] >= needed;
        }
        path.push_back(node);
        if (is_usable) usable = length;
        return true;
    });
    return usable;
}

int KvCache::acquire_prefix(BlockTable& table, std::span<const BlockKey> keys) {
    path_.clear();
    const int length = match(keys, path_);
    for (int g = 0; g < num_groups(); ++g) {
        Group& group = groups_[g];
        BlockTable::Group& held = table.groups[g];
        held.first = group.spec.window == 0 ? 0 : std::max(0, length - group.window_blocks);
        held.entries.assign(length, kNoBlock);
        for (int i = held.first; i < length; ++i) {
            const BlockId block = tree_.block(path_[i], g);
            group.pool.add_ref(block);
            held.entries[i] = entry_of(g, block);
        }
    }
    table.num_committed = length;
    return length;
}

bool KvCache::extend(BlockTable& table, int chunk_end, int prompt_end, int spare) {
    const auto missing = [&](int g) {
        const int end = groups_[g].spec.window == 0 ? prompt_end : chunk_end;
        return ceil_div(end, block_size_) - static_cast<int>(table.groups[g].entries.size());
    };
    for (int g = 0; g < num_groups(); ++g) {
        const int needed = missing(g);
        if (needed > 0 && groups_[g].pool.available() < needed + spare) return false;
    }
    for (int g = 0; g < num_groups(); ++g)
        for (int n = missing(g); n > 0; --n) table.groups[g].entries.push_back(entry_of(g, take_block(g)));
    return true;
}

BlockId KvCache::take_block(int g) {
    BlockPool& pool = groups_[g].pool;
    if (!pool.has_free()) evict(g, pool.oldest_cached());
    return pool.take_free();
}

// A node without one of its full-attention blocks is of no use, so it loses all its blocks. Blocks are released last
// block first, so the oldest cached block of a full-attention group is always a leaf.
void KvCache::evict(int g, BlockId block) {
    const NodeId node = groups_[g].pool.node(block);
    const bool whole_node = groups_[g].spec.window == 0;
    for (int h = 0; h < num_groups(); ++h) {
        const BlockId held = tree_.block(node, h);
        if (held == kNone || (h != g && !whole_node)) continue;
        groups_[h].pool.free_cached(held);
        tree_.set_block(node, h, kNone);
    }
    if (tree_.is_empty(node)) tree_.erase(node);
}

void KvCache::commit(BlockTable& table, std::span<const BlockKey> keys, int num_blocks) {
    for (int i = table.num_committed; i < num_blocks; ++i) {
        NodeId node = tree_.find(keys[i]);
        if (node == kNone) node = tree_.insert(keys[i]);
        for (int g = 0; g < num_groups(); ++g) adopt(g, table.groups[g].entries[i], node);
    }
    table.num_committed = std::max(table.num_committed, num_blocks);
}

void KvCache::adopt(int g, int32_t& entry, NodeId node) {
    BlockPool& pool = groups_[g].pool;
    const BlockId known = tree_.block(node, g);
    const BlockId own = block_of(g, entry);
    if (known == kNone) {
        tree_.set_block(node, g, own);
        pool.set_node(own, node);
    } else {
        pool.add_ref(known);
        pool.drop_ref(own);
        entry = entry_of(g, known);
    }
}

void KvCache::release_outside_window(BlockTable& table, int num_computed) {
    for (int g = 0; g < num_groups(); ++g) {
        if (groups_[g].spec.window == 0) continue;
        BlockTable::Group& held = table.groups[g];
        const int first_visible = std::max(0, num_computed - groups_[g].spec.window) / block_size_;
        for (; held.first < first_visible; ++held.first) {
            groups_[g].pool.drop_ref(block_of(g, held.entries[held.first]));
            held.entries[held.first] = kNoBlock;
        }
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

void KvCache::retire(BlockTable& table) {
    for (int g = 0; g < num_groups(); ++g) {
        BlockTable::Group& held = table.groups[g];
        const int keep = std::max(table.num_committed, held.first);
        for (; static_cast<int>(held.entries.size()) > keep; held.entries.pop_back())
            groups_[g].pool.retire(block_of(g, held.entries.back()));
    }
    release(table);
}

void KvCache::settle() {
    for (Group& group : groups_) group.pool.settle();
}

void KvCache::reset() {
    for (int g = 0; g < num_groups(); ++g)
        for (BlockId b; (b = groups_[g].pool.oldest_cached()) != kNone;) evict(g, b);
}

std::vector<GroupStats> KvCache::stats() const {
    std::vector<GroupStats> stats;
    for (const Group& group : groups_) stats.push_back(group.pool.stats());
    return stats;
}

void KvCache::check(std::span<const BlockTable* const> tables,
                    std::span<const std::vector<BlockKey>* const> keys) const {
    for (int g = 0; g < num_groups(); ++g) {
        std::vector<int> refs(groups_[g].pool.total(), 0);
        for (const BlockTable* table : tables)
            for (int32_t entry : table->groups[g].entries)
                refs[entry == kNoBlock ? 0 : block_of(g, entry)] += entry != kNoBlock;
        groups_[g].pool.check(refs);
    }
    for (size_t i = 0; i < tables.size(); ++i) check_table(*tables[i], *keys[i]);

    tree_.check();
    std::vector<int> in_tree(groups_.size(), 0);
    tree_.for_each([&](NodeId node) {
        check_that(!tree_.is_empty(node), "a node holds a block");
        for (int g = 0; g < num_groups(); ++g) {
            const BlockId block = tree_.block(node, g);
            check_that(block != kNone || groups_[g].spec.window > 0, "a node has all its full-attention blocks");
            if (block == kNone) continue;
            check_that(groups_[g].pool.node(block) == node, "a block in the tree knows its node");
            ++in_tree[g];
        }
    });
    for (int g = 0; g < num_groups(); ++g) {
        int with_node = 0;
        for (BlockId b = 0; b < groups_[g].pool.total(); ++b) with_node += groups_[g].pool.node(b) != kNone;
        check_that(with_node == in_tree[g], "a block that knows a node is in it");
    }
}

void KvCache::check_table(const BlockTable& table, const std::vector<BlockKey>& keys) const {
    for (int g = 0; g < num_groups(); ++g) {
        const BlockTable::Group& held = table.groups[g];
        const int size = static_cast<int>(held.entries.size());
        check_that(held.first <= size && table.num_committed <= size, "a table holds what it has committed");
        for (int i = 0; i < size; ++i) {
            check_that((held.entries[i] == kNoBlock) == (i < held.first), "only the window's past has no block");
            if (i < held.first || i >= table.num_committed) continue;
            const NodeId node = tree_.find(keys[i]);
            check_that(node != kNone && entry_of(g, tree_.block(node, g)) == held.entries[i],
                       "a committed block is the tree's block of its key");
        }
    }
}

}  // namespace swiftkv
