// The blocks that are on offer to storage: written, known to the prefix index, and not taken yet.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "types.h"

namespace swiftkv {

// The time at which a block is offered to storage.
enum class WritePolicy : uint8_t {
    kNever,
    kWriteThrough,           // once its bytes are committed
    kWriteThroughSelective,  // once another request has found it
    kWriteBack,              // once it is among the next to be evicted
};

// A queue of offers, the oldest first. A block is offered only once while the prefix index knows it.
class Offers {
  public:
    struct Offer {
        BlockKey key;
        int group;
    };

    // `max_waiting`: if more offers wait, the oldest are dropped.
    Offers(int num_groups, int max_waiting) : num_groups_(num_groups), max_waiting_(max_waiting) {}

    // Sets the policy. kNever forgets what was offered and stored, because storage that comes later may be another.
    void set_policy(WritePolicy policy);
    WritePolicy policy() const { return policy_; }
    // Offers a block of a node. Returns false if it was offered before, or storage has it.
    bool add(NodeId node, int group, const BlockKey& key);
    // Notes that storage has the block.
    void mark_stored(NodeId node, int group);
    // Forgets a block that the index has lost.
    void forget(NodeId node, int group);
    // Whether a block was offered, or storage has it.
    bool is_marked(NodeId node, int group) const;
    int num_waiting() const { return static_cast<int>(waiting_.size()); }
    Offer take();
    // The number of blocks that were not taken in time.
    int64_t num_dropped_total() const { return num_dropped_total_; }
    void count_dropped() { ++num_dropped_total_; }

  private:
    // Marks a block as offered or stored. Returns whether it was not marked before.
    bool mark(NodeId node, int group);
    size_t cell(NodeId node, int group) const { return static_cast<size_t>(node) * num_groups_ + group; }

    int num_groups_;
    int max_waiting_;
    WritePolicy policy_ = WritePolicy::kNever;
    std::deque<Offer> waiting_;
    std::vector<bool> is_marked_;  // [node][group]
    int64_t num_dropped_total_ = 0;
};

}  // namespace swiftkv
