// The blocks that are on offer to storage: written, known to the prefix index, and not taken yet.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "types.h"

namespace swiftkv {

// When a block is offered to storage.
enum class WritePolicy : uint8_t {
    kNever,
    kWriteThrough,           // once its bytes are committed
    kWriteThroughSelective,  // once another request has found it
    kWriteBack,              // once it is among the next to be evicted
};

// A queue of offers, the oldest first. A block is offered once, for as long as the prefix index knows it.
class Offers {
  public:
    struct Offer {
        BlockKey key;
        int group;
    };

    // `max_waiting`: beyond that the oldest offers are dropped.
    Offers(int num_groups, int max_waiting) : num_groups_(num_groups), max_waiting_(max_waiting) {}

    // kNever forgets what was offered and stored: storage that comes later is another one.
    void set_policy(WritePolicy policy);
    WritePolicy policy() const { return policy_; }
    // Offers a block of a node; false if that was done before, or storage has the block.
    bool add(NodeId node, int group, const BlockKey& key);
    // Storage has the block.
    void mark_stored(NodeId node, int group);
    // The index has lost the block.
    void forget(NodeId node, int group);
    // Whether a block was offered, or storage has it.
    bool is_marked(NodeId node, int group) const;
    int num_waiting() const { return static_cast<int>(waiting_.size()); }
    Offer take();
    // Blocks that were not taken in time.
    int64_t num_dropped_total() const { return num_dropped_total_; }
    void count_dropped() { ++num_dropped_total_; }

  private:
    // Whether a block that was not offered before is now marked as if it had been.
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
