// The boundaries of prefixes whose tails the cache keeps for requests that continue there.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <unordered_map>
#include <vector>

#include "paths.h"
#include "types.h"

namespace swiftkv {

// A boundary is the end of a prefix, named by its last node. A sliding-window group needs a tail of blocks before it,
// and keeps one block more, so that the prefix that is a block shorter can be used as well. A boundary lasts as long as
// all of its tails and, if a group has full attention, all nodes of its prefix.
class Boundaries {
  public:
    // `num_tails`: the blocks of a tail per group; kNone for full attention, which needs every block of a prefix.
    explicit Boundaries(std::vector<int> num_tails);

    // The most nodes before a boundary whose worth depends on it.
    int max_span() const { return max_span_; }
    // Whether the path to this node is known.
    bool knows_path(NodeId node) const { return paths_.has(node); }
    // Notes that a node lies on the path to a boundary, after `before`, whose path is known; kNone: it is the first.
    void extend_path(NodeId node, NodeId before) { paths_.add(node, before); }
    // Keeps the boundary after `nodes`, which are at most max_span(), the last node first. With full attention, the
    // path to it must be known. A boundary that is kept already gets the higher of both worths.
    void keep(std::span<const NodeId> nodes, Worth worth);
    // Notes that the node has lost its block of a group. Ends the boundaries that needed it, and returns their nodes.
    std::vector<NodeId> lose(NodeId node, int group);
    // Forgets a node that is about to be erased.
    void forget(NodeId node);
    // Returns the worth of the node's block: the highest among the boundaries whose tails contain it.
    Worth worth(NodeId node, int group) const;

    // The nodes of all boundaries that the node is part of.
    std::vector<NodeId> nodes_beside(NodeId node) const;

    // Calls visit(node) for every node on the path to a boundary.
    template <class Visit>
    void for_each_on_path(Visit&& visit) const {
        paths_.for_each(visit);
    }
    // Calls visit(nodes) for every boundary.
    template <class Visit>
    void for_each(Visit&& visit) const {
        for (const auto& [number, boundary] : boundaries_) visit(std::span<const NodeId>(boundary.nodes));
    }
    // Whether a block `distance` before the last one of a boundary's prefix is needed to use the boundary.
    bool needs(int group, int distance) const { return num_tails_[group] == kNone || distance < num_tails_[group]; }
    // Throws std::runtime_error if an invariant is violated.
    void check() const;

  private:
    using Number = int64_t;  // in order of creation
    struct Boundary {
        std::vector<NodeId> nodes;
        Worth worth;
    };
    std::vector<Number> broken_by(NodeId node, int group);
    void erase(Number number);

    std::vector<int> num_tails_;
    int max_span_ = 0;
    bool needs_paths_ = false;  // some group needs every block of a prefix
    Number next_ = 0;
    Paths paths_;
    std::map<Number, Boundary> boundaries_;
    std::unordered_map<NodeId, Number> ends_;                      // the boundary right after a node
    std::unordered_map<NodeId, std::map<Number, int>> distances_;  // of each node to the boundaries it is part of
};

}  // namespace swiftkv
