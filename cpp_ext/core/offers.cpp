#include "offers.h"

#include "../common/check.h"

namespace swiftkv {

void Offers::set_policy(WritePolicy policy) {
    policy_ = policy;
    if (policy != WritePolicy::kNever) return;
    waiting_.clear();
    is_marked_.clear();
}

bool Offers::add(NodeId node, int group, const BlockKey& key) {
    if (!mark(node, group)) return false;
    if (static_cast<int>(waiting_.size()) == max_waiting_) {
        waiting_.pop_front();
        count_dropped();
    }
    waiting_.push_back({key, group});
    return true;
}

void Offers::mark_stored(NodeId node, int group) {
    mark(node, group);
}

bool Offers::is_marked(NodeId node, int group) const {
    return cell(node, group) < is_marked_.size() && is_marked_[cell(node, group)];
}

bool Offers::mark(NodeId node, int group) {
    if (is_marked(node, group)) return false;
    const size_t marked = cell(node, group);
    if (marked >= is_marked_.size()) is_marked_.resize(2 * marked + num_groups_);
    is_marked_[marked] = true;
    return true;
}

void Offers::forget(NodeId node, int group) {
    if (is_marked(node, group)) is_marked_[cell(node, group)] = false;
}

Offers::Offer Offers::take() {
    ensure(!waiting_.empty(), "an offer that is taken was made");
    const Offer offer = waiting_.front();
    waiting_.pop_front();
    return offer;
}

}  // namespace swiftkv
