// The owners of the extents of a pool that several KV groups share.
#pragma once

#include <cstdint>
#include <vector>

#include "../common/extents.h"
#include "free_set.h"
#include "types.h"

namespace swiftkv {

// Each extent is owned by one group at a time, or by none. A group takes an extent when it needs blocks, and gives it
// back as soon as all of its blocks are free. An extent that is lent to a peer belongs to the first group until the
// peer returns it.
class House {
  public:
    explicit House(int num_extents);

    int num_extents() const { return static_cast<int>(owners_.size()); }
    int num_free() const { return free_.count(); }
    // Returns the group that owns the extent; kNone if no group does.
    int owner(ExtentId extent) const { return owners_[extent]; }
    // Gives the group the lowest extent that has no owner, and returns it; there must be one.
    ExtentId take(int group);
    // Gives the group this extent, which has no owner.
    void take(int group, ExtentId extent);
    void give_back(int group, ExtentId extent);
    // Advances the clock by which groups compare when their blocks were cached; it may wrap.
    uint32_t tick() { return ++clock_; }
    // Throws std::runtime_error if an invariant is violated.
    void check() const;

  private:
    std::vector<int> owners_;
    FreeSet free_;
    uint32_t clock_ = 0;
};

}  // namespace swiftkv
