#include "prefix_tree.h"

#include <algorithm>
#include <bit>

#include "check.h"

namespace swiftkv {

PrefixTree::PrefixTree(int num_groups, int max_nodes)
    : num_groups_(num_groups), bucket_mask_(std::bit_ceil(2 * static_cast<size_t>(max_nodes)) - 1) {
    buckets_.assign(bucket_mask_ + 1, kNone);
}

NodeId PrefixTree::find(const BlockKey& key) const {
    return find_in(buckets_[bucket(key)], key);
}

NodeId PrefixTree::insert(const BlockKey& key) {
    assert(find(key) == kNone);
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
    return node;
}

void PrefixTree::erase(NodeId node) {
    assert(is_empty(node));
    NodeId* link = &buckets_[bucket(nodes_[node].key)];
    while (*link != node) link = &nodes_[*link].next;
    *link = nodes_[node].next;
    nodes_[node].next = free_nodes_;
    free_nodes_ = node;
}

bool PrefixTree::is_empty(NodeId node) const {
    const auto first = blocks_.begin() + static_cast<std::ptrdiff_t>(index(node, 0));
    return std::all_of(first, first + num_groups_, [](BlockId b) { return b == kNone; });
}

void PrefixTree::check() const {
    size_t listed = 0;
    for_each([&](NodeId node) {
        check_that(find(nodes_[node].key) == node, "a key has one node, in its bucket");
        ++listed;
    });
    for (NodeId node = free_nodes_; node != kNone; node = nodes_[node].next) ++listed;
    check_that(listed == nodes_.size(), "every node is in a bucket or free");
}

}  // namespace swiftkv
