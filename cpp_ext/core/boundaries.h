// The boundaries of prefixes whose tails the cache keeps for the next request that comes that way.
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
// and keeps one block more: then the prefix that is a block shorter can be used as well. A boundary lasts as long as
// all of its tails, and where there is full attention as long as all nodes of its prefix.
class Boundaries {
  public:
    // `num_tails`: per group; kNone for full attention, which needs every block of a prefix.
    explicit Boundaries(std::vector<int> num_tails);

    // The most blocks of a prefix whose worth depends on a boundary.
    int max_span() const { return max_span_; }
    // Whether the way to a boundary behind this node is known.
    bool knows_path(NodeId node) const { return paths_.has(node); }
    // Notes that a node lies on the way to a boundary, behind `before`, whose own way is known; kNone: it is the first.
    void extend_path(NodeId node, NodeId before) { paths_.add(node, before); }
    // Keeps the boundary behind `nodes`, the last node first, and at most max_span() of them. With full attention,
    // the way to it must be known. A boundary that is kept already gets the higher of both worths.
    void keep(std::span<const NodeId> nodes, Worth worth);
    // The node has lost its block of a group. Boundaries that needed it are no more: returns their nodes.
    std::vector<NodeId> lose(NodeId node, int group);
    // The node is about to go.
    void forget(NodeId node);
    // What the tails that have the node's block make it worth.
    Worth worth(NodeId node, int group) const;

    // The nodes of all boundaries that the node is part of.
    std::vector<NodeId> nodes_beside(NodeId node) const;

    // Calls visit(node) for every node on the way to a boundary.
    template <class Visit>
    void for_each_on_path(Visit&& visit) const {
        paths_.for_each(visit);
    }
    // Calls visit(nodes) for every boundary.
    template <class Visit>
    void for_each(Visit&& visit) const {
        for (const auto& [number, boundary] : boundaries_) visit(std::span<const NodeId>(boundary.nodes));
    }
    // Whether a block so far below a boundary, 0 being the last one, is needed to use it.
    bool needs(int group, int distance) const { return num_tails_[group] == kNone || distance < num_tails_[group]; }
    // Throws std::runtime_error on any disagreement.
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
    std::unordered_map<NodeId, Number> ends_;                      // the boundary right behind a node
    std::unordered_map<NodeId, std::map<Number, int>> distances_;  // of each node, below the boundaries it is part of
};

}  // namespace swiftkv
