#include "paths.h"

#include <utility>

#include "../common/check.h"

namespace swiftkv {

void Paths::add(NodeId node, NodeId before) {
    ensure(!has(node) && (before == kNone || has(before)), "a node comes behind one that is there");
    if (node >= static_cast<NodeId>(places_.size())) places_.resize(node + 1);
    NodePlace& added = places_[node];
    added = {.before = before, .is_on_path = true};
    if (before == kNone) return;
    added.next = std::exchange(places_[before].first_behind, node);
    if (added.next != kNone) places_[added.next].previous = node;
}

void Paths::unlink(const NodePlace& place) {
    if (place.next != kNone) places_[place.next].previous = place.previous;
    if (place.previous != kNone) {
        places_[place.previous].next = place.next;
    } else if (place.before != kNone) {
        places_[place.before].first_behind = place.next;
    }
}

std::vector<NodeId> Paths::cut(NodeId node) {
    std::vector<NodeId> gone;
    if (!has(node)) return gone;
    unlink(places_[node]);
    gone.push_back(node);
    for (size_t i = 0; i < gone.size(); ++i) {
        const NodePlace place = std::exchange(places_[gone[i]], {});
        for (NodeId behind = place.first_behind; behind != kNone; behind = places_[behind].next) gone.push_back(behind);
    }
    return gone;
}

void Paths::check() const {
    for_each([&](NodeId node) {
        const NodePlace& place = places_[node];
        check_that(place.before == kNone || has(place.before), "a path has no gap");
        check_that(place.next == kNone || (follows(place.next, place.before) && places_[place.next].previous == node),
                   "the nodes right behind one node are linked both ways");
        check_that(place.first_behind == kNone || follows(place.first_behind, node),
                   "a node knows what lies behind it");
    });
}

}  // namespace swiftkv
