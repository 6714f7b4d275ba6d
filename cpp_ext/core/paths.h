// The paths to boundaries: which node follows which in a prefix.
#pragma once

#include <vector>

#include "types.h"

namespace swiftkv {

// A forest of nodes. A node is part of it only while all nodes before it in its prefix are, so cut() also takes out all
// nodes after one. Each node that was added is removed at most once, in constant time.
class Paths {
  public:
    bool has(NodeId node) const { return node < static_cast<NodeId>(places_.size()) && places_[node].is_on_path; }
    // Adds a node. `before`: the node before it in its prefix, which is part of the forest; kNone: it is the first.
    void add(NodeId node, NodeId before);
    // Takes out a node, if it is there, and all nodes after it; returns them.
    std::vector<NodeId> cut(NodeId node);
    // Whether `node` is in the forest, right after `before`.
    bool follows(NodeId node, NodeId before) const { return has(node) && places_[node].before == before; }

    // Calls visit(node) for every node.
    template <class Visit>
    void for_each(Visit&& visit) const {
        for (NodeId node = 0; node < static_cast<NodeId>(places_.size()); ++node)
            if (has(node)) visit(node);
    }
    // Throws std::runtime_error if an invariant is violated.
    void check() const;

  private:
    struct NodePlace {
        NodeId before = kNone, first_behind = kNone;
        NodeId next = kNone, previous = kNone;  // among the nodes right after the same node
        bool is_on_path = false;
    };
    void unlink(const NodePlace& place);

    std::vector<NodePlace> places_;  // by node
};

}  // namespace swiftkv
