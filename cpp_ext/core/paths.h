// The ways to boundaries: which nodes lie behind which in their prefixes.
#pragma once

#include <vector>

#include "types.h"

namespace swiftkv {

// A forest of nodes. A node is part of it only while all nodes before it in its prefix are: cut() takes out everything
// behind a node, too. So each add() is paid for by one removal at most, in constant time.
class Paths {
  public:
    bool has(NodeId node) const { return node < static_cast<NodeId>(places_.size()) && places_[node].is_on_path; }
    // `before`: the node before this one in its prefix, which is part of the forest; kNone: it is the first.
    void add(NodeId node, NodeId before);
    // Takes out a node, if it is there, and all that lie behind it; returns them.
    std::vector<NodeId> cut(NodeId node);
    // Whether `node` comes right after `before`.
    bool follows(NodeId node, NodeId before) const { return has(node) && places_[node].before == before; }

    // Calls visit(node) for every node.
    template <class Visit>
    void for_each(Visit&& visit) const {
        for (NodeId node = 0; node < static_cast<NodeId>(places_.size()); ++node)
            if (has(node)) visit(node);
    }
    // Throws std::runtime_error on any disagreement.
    void check() const;

  private:
    struct NodePlace {
        NodeId before = kNone, first_behind = kNone;
        NodeId next = kNone, previous = kNone;  // among those that lie right behind the same node
        bool is_on_path = false;
    };
    void unlink(const NodePlace& place);

    std::vector<NodePlace> places_;  // by node
};

}  // namespace swiftkv
