#include "prefix_index.h"

#include <algorithm>
#include <bit>

#include "../common/check.h"

namespace swiftkv {

PrefixIndex::PrefixIndex(int num_groups, int max_nodes)
    : num_groups_(num_groups), bucket_mask_(std::bit_ceil(2 * static_cast<size_t>(max_nodes)) - 1) {
    buckets_.assign(bucket_mask_ + 1, kNone);
}

NodeId PrefixIndex::find(const BlockKey& key) const {
    return find_in(buckets_[bucket(key)], key);
}

NodeId PrefixIndex::find_or_insert(const BlockKey& key) {
    if (const NodeId known = find(key); known != kNone) return known;
    NodeId node = free_nodes_;
    if (node != kNone) {
        free_nodes_ = nodes_[node].next;
    } else {
        node = static_cast<NodeId>(nodes_.size());
        nodes_.emplace_back();
        blocks_.resize(blocks_.size() + num_groups_, kNone);
    }
    NodeId& head = buckets_[bucket(key)];
    nodes_[node] = {key, head};
    head = node;
    if (news_.size() < kMaxNews) news_.push_back(key);
    return node;
}

void PrefixIndex::erase(NodeId node) {
    ensure(is_empty(node), "a node that is removed holds no block");
    NodeId* link = &buckets_[bucket(nodes_[node].key)];
    while (*link != node) {
        ensure(*link != kNone, "a node is in the bucket of its key");
        link = &nodes_[*link].next;
    }
    *link = nodes_[node].next;
    nodes_[node].next = free_nodes_;
    free_nodes_ = node;
}

bool PrefixIndex::is_empty(NodeId node) const {
    const auto first = blocks_.begin() + static_cast<std::ptrdiff_t>(cell(node, 0));
    return std::all_of(first, first + num_groups_, [](BlockId b) { return b == kNone; });
}

}  // namespace swiftkv
