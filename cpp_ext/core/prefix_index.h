// The index of known full blocks by key: one node per block of tokens, with the resident block of each KV group.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "../common/check.h"
#include "types.h"

namespace swiftkv {

// A hash table: keys are chained, so a key names its whole prefix, and neither parents nor children are stored. A
// sliding-window group may lack its block where others have theirs.
class PrefixIndex {
  public:
    // `max_nodes`: the number of blocks of all groups suffices, because a node has at least one.
    PrefixIndex(int num_groups, int max_nodes);

    NodeId find(const BlockKey& key) const;
    NodeId find_or_insert(const BlockKey& key);
    void erase(NodeId node);  // it must have no block any more
    // Returns the first kMaxNews keys that were inserted since the last call.
    std::vector<BlockKey> take_news() { return std::exchange(news_, {}); }
    // Calls visit(i, node) for i = 0, 1, … with find(keys[i]) until it returns false. Hides memory latency.
    template <class Visit>
    void find_each(std::span<const BlockKey> keys, Visit&& visit) const;

    // Returns the node's block in that group; kNone if it has none.
    BlockId block(NodeId node, int group) const { return blocks_[cell(node, group)]; }
    void set_block(NodeId node, int group, BlockId block) { blocks_[cell(node, group)] = block; }
    bool is_empty(NodeId node) const;
    const BlockKey& key(NodeId node) const { return nodes_[node].key; }
    // Throws std::runtime_error if nodes are lost.
    void check() const;

    // Calls visit(node) for every node.
    template <class Visit>
    void for_each(Visit&& visit) const;

  private:
    static constexpr size_t kMaxNews = 4096;

    struct Node {
        BlockKey key;
        NodeId next;  // in the same bucket, or in the list of free nodes
    };
    size_t cell(NodeId node, int group) const {
        const size_t cell = static_cast<size_t>(node) * num_groups_ + group;
        ensure(cell < blocks_.size(), "a node is one of the index's");  // fails for kNone
        return cell;
    }
    // Keys are uniformly random, so any bits of them are a hash.
    size_t bucket(const BlockKey& key) const { return key[0] & bucket_mask_; }
    NodeId find_in(NodeId node, const BlockKey& key) const;

    int num_groups_;
    size_t bucket_mask_;
    std::vector<NodeId> buckets_;
    std::vector<Node> nodes_;
    std::vector<BlockId> blocks_;  // [node][group]
    NodeId free_nodes_ = kNone;
    std::vector<BlockKey> news_;
};

inline NodeId PrefixIndex::find_in(NodeId node, const BlockKey& key) const {
    while (node != kNone && nodes_[node].key != key) node = nodes_[node].next;
    return node;
}

template <class Visit>
void PrefixIndex::find_each(std::span<const BlockKey> keys, Visit&& visit) const {
    constexpr size_t kNear = 16, kFar = 32;  // nodes and buckets are prefetched so many keys ahead
    const size_t n = keys.size();
    for (size_t i = 0; i < n; ++i) {
        if (i + kFar < n) __builtin_prefetch(&buckets_[bucket(keys[i + kFar])]);
        if (i + kNear < n) {
            if (const NodeId ahead = buckets_[bucket(keys[i + kNear])]; ahead != kNone) {
                __builtin_prefetch(&nodes_[ahead]);
                __builtin_prefetch(&blocks_[cell(ahead, 0)]);
            }
        }
        if (!visit(i, find_in(buckets_[bucket(keys[i])], keys[i]))) return;
    }
}

template <class Visit>
void PrefixIndex::for_each(Visit&& visit) const {
    for (NodeId head : buckets_)
        for (NodeId node = head; node != kNone; node = nodes_[node].next) visit(node);
}

}  // namespace swiftkv
