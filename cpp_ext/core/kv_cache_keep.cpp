// The part of the cache that keeps boundaries and evicts blocks.
#include "../common/check.h"
#include "kv_cache.h"

namespace swiftkv {

// Evicts a cached block. A node without one of its full-attention blocks is of no use, so it loses all its blocks.
// Requests release their last block first, so the oldest cached block of a full-attention group is a leaf, unless a
// block in the middle was lost: then the blocks after it are of no use, and stay until they are the oldest or that one
// is computed again.
void KvCache::evict(int g, BlockId block) noexcept {
    const NodeId node = groups_[g].pool.node(block);
    ensure(node != kNone, "a block that is evicted is in the prefix index");
    const bool whole_node = groups_[g].spec.window == 0;
    if (whole_node || !has_full_attention_) evictions_.note(index_.key(node));
    for (int h = 0; h < num_groups(); ++h) {
        const BlockId held = index_.block(node, h);
        if (held == kNone || (h != g && !whole_node)) continue;
        if (is_lost_unstored(h, node)) offers_.count_dropped();
        groups_[h].pool.forget(held);
        point_to(node, h, kNone);
        offers_.forget(node, h);
    }
    if (has_windows_) {
        set_worths(boundaries_.lose(node, g));
        if (index_.is_empty(node)) boundaries_.forget(node);
        ++num_window_losses_;
    }
    if (index_.is_empty(node)) index_.erase(node);
}

void KvCache::keep_boundary(std::span<const BlockKey> keys, int length, Worth worth) {
    std::vector<NodeId> nodes;
    for (int i = length - 1; i >= 0 && length - i <= boundaries_.max_span(); --i) {
        const NodeId node = index_.find(keys[i]);
        for (int g = 0; g < num_groups(); ++g)
            if (boundaries_.needs(g, length - 1 - i) && (node == kNone || index_.block(node, g) == kNone)) return;
        if (node == kNone) break;
        nodes.push_back(node);
    }
    if (nodes.empty() || !find_path(keys.first(length))) return;
    boundaries_.keep(nodes, worth);
    set_worths(nodes);
    offer_tail(nodes, keys.first(length));
}

// Adds the path to the end of a prefix to the known paths of boundaries; returns false if some of its nodes are gone.
bool KvCache::find_path(std::span<const BlockKey> keys) {
    if (!has_full_attention_) return true;
    std::vector<NodeId> unknown;  // last one first
    NodeId before = kNone;
    for (size_t i = keys.size(); i > 0 && before == kNone; --i) {
        const NodeId node = index_.find(keys[i - 1]);
        if (node == kNone) return false;
        if (boundaries_.knows_path(node)) {
            before = node;
        } else {
            unknown.push_back(node);
        }
    }
    for (; !unknown.empty(); unknown.pop_back()) {
        boundaries_.extend_path(unknown.back(), before);
        before = unknown.back();
    }
    return true;
}

void KvCache::set_worths(std::span<const NodeId> nodes) {
    for (NodeId node : nodes) {
        for (int g = 0; g < num_groups(); ++g) {
            const BlockId block = index_.block(node, g);
            if (groups_[g].spec.window == 0 || block == kNone) continue;
            const Worth worth = boundaries_.worth(node, g);
            groups_[g].pool.set_worth(block, worth, worth == Worth::kNone || offers_.is_marked(node, g));
        }
    }
}

}  // namespace swiftkv
