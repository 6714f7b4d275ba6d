#include "boundaries.h"

#include <algorithm>
#include <utility>

#include "../common/check.h"

namespace swiftkv {

Boundaries::Boundaries(std::vector<int> num_tails) : num_tails_(std::move(num_tails)) {
    for (int tail : num_tails_) {
        if (tail != kNone) max_span_ = std::max(max_span_, tail + 1);
        needs_paths_ |= tail == kNone;
    }
}

void Boundaries::keep(std::span<const NodeId> nodes, Worth worth) {
    ensure(!needs_paths_ || knows_path(nodes.front()), "a boundary that is kept has a whole prefix");
    const auto [end, is_new] = ends_.try_emplace(nodes.front(), next_);
    if (!is_new) {
        Worth& known = boundaries_.at(end->second).worth;
        known = std::max(known, worth);
        return;
    }
    boundaries_.emplace(next_, Boundary{{nodes.begin(), nodes.end()}, worth});
    for (int i = 0; i < static_cast<int>(nodes.size()); ++i) distances_[nodes[i]].emplace(next_, i);
    ++next_;
}

// Returns the boundaries that need the node's block of a group: with full attention all those after it, with a sliding
// window those whose tail contains it.
std::vector<Boundaries::Number> Boundaries::broken_by(NodeId node, int group) {
    std::vector<Number> broken;
    if (num_tails_[group] == kNone) {
        for (NodeId gone : paths_.cut(node))
            if (const auto end = ends_.find(gone); end != ends_.end()) broken.push_back(end->second);
        std::sort(broken.begin(), broken.end());
    } else if (const auto found = distances_.find(node); found != distances_.end()) {
        for (const auto& [number, distance] : found->second)
            if (needs(group, distance)) broken.push_back(number);
    }
    return broken;
}

std::vector<NodeId> Boundaries::lose(NodeId node, int group) {
    std::vector<NodeId> touched;
    for (Number number : broken_by(node, group)) {
        const std::vector<NodeId>& nodes = boundaries_.at(number).nodes;
        touched.insert(touched.end(), nodes.begin(), nodes.end());
        erase(number);
    }
    return touched;
}

void Boundaries::forget(NodeId node) {
    const auto found = distances_.find(node);
    if (found == distances_.end()) return;
    for (const auto& [number, distance] : found->second) {
        std::vector<NodeId>& nodes = boundaries_.at(number).nodes;
        ensure(distance + 1 == static_cast<int>(nodes.size()), "a boundary can lose only the block below its tails");
        nodes.pop_back();
        if (!nodes.empty()) continue;
        ends_.erase(node);
        boundaries_.erase(number);
    }
    distances_.erase(found);
}

Worth Boundaries::worth(NodeId node, int group) const {
    Worth most = Worth::kNone;
    const auto found = distances_.find(node);
    if (found == distances_.end()) return most;
    for (const auto& [number, distance] : found->second) {
        if (distance > num_tails_[group]) continue;
        most = std::max(most, boundaries_.at(number).worth);
        if (most == Worth::kKept) break;
    }
    return most;
}

std::vector<NodeId> Boundaries::nodes_beside(NodeId node) const {
    std::vector<NodeId> beside;
    const auto found = distances_.find(node);
    if (found == distances_.end()) return beside;
    for (const auto& [number, distance] : found->second) {
        const std::vector<NodeId>& nodes = boundaries_.at(number).nodes;
        beside.insert(beside.end(), nodes.begin(), nodes.end());
    }
    return beside;
}

void Boundaries::erase(Number number) {
    ends_.erase(boundaries_.at(number).nodes.front());
    for (NodeId node : boundaries_.at(number).nodes) {
        const auto found = distances_.find(node);
        ensure(found != distances_.end() && found->second.erase(number) == 1, "a node knows its boundaries");
        if (found->second.empty()) distances_.erase(found);
    }
    boundaries_.erase(number);
}

void Boundaries::check() const {
    paths_.check();
    size_t listed = 0, known = 0;
    for (const auto& [number, boundary] : boundaries_) {
        for (size_t i = 0; needs_paths_ && i + 1 < boundary.nodes.size(); ++i)
            check_that(paths_.follows(boundary.nodes[i], boundary.nodes[i + 1]), "the way to a boundary is known");
        listed += boundary.nodes.size();
        check_that(ends_.at(boundary.nodes.front()) == number, "a node knows the boundary right behind it");
        for (int i = 0; i < static_cast<int>(boundary.nodes.size()); ++i)
            check_that(distances_.at(boundary.nodes[i]).at(number) == i, "a node knows how far below a boundary it is");
    }
    for (const auto& [node, distances] : distances_) known += distances.size();
    check_that(listed == known && ends_.size() == boundaries_.size(), "a node knows no boundary but its own");
}

}  // namespace swiftkv
