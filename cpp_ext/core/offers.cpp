#include "offers.h"

#include "../common/check.h"

namespace swiftkv {

void Offers::set_policy(WritePolicy policy) {
    policy_ = policy;
    if (policy != WritePolicy::kNever) return;
    waiting_.clear();
    is_marked_.clear();
}

void Offers::add(NodeId node, int group, const BlockKey& key) {
    if (!mark(node, group)) return;
    if (static_cast<int>(waiting_.size()) == max_waiting_) {
        waiting_.pop_front();
        count_dropped();
    }
    waiting_.push_back({key, group});
}

void Offers::mark_stored(NodeId node, int group) {
    mark(node, group);
}

bool Offers::mark(NodeId node, int group) {
    const size_t cell = static_cast<size_t>(node) * num_groups_ + group;
    if (cell >= is_marked_.size()) is_marked_.resize(2 * cell + num_groups_);
    if (is_marked_[cell]) return false;
    is_marked_[cell] = true;
    return true;
}

void Offers::forget(NodeId node, int group) {
    const size_t cell = static_cast<size_t>(node) * num_groups_ + group;
    if (cell < is_marked_.size()) is_marked_[cell] = false;
}

Offers::Offer Offers::take() {
    ensure(!waiting_.empty(), "an offer that is taken was made");
    const Offer offer = waiting_.front();
    waiting_.pop_front();
    return offer;
}

}  // namespace swiftkv
