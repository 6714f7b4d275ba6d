// Which KV group has which extent of a pool that several groups share.
#pragma once

#include <cstdint>
#include <vector>

#include "../common/extents.h"
#include "free_set.h"
#include "types.h"

namespace swiftkv {

// An extent is one group's at a time, or nobody's. Each group is a borrower in its own house, without messages: it
// takes an extent when it needs blocks, and the extent is nobody's again as soon as all of its blocks are free. What is
// lent to peers is lent in the name of the first group, whose it is until it comes home.
class House {
  public:
    explicit House(int num_extents);

    int num_extents() const { return static_cast<int>(owners_.size()); }
    int num_free() const { return free_.count(); }
    // kNone: nobody's.
    int owner(ExtentId extent) const { return owners_[extent]; }
    // Returns the lowest extent that is nobody's, the group's from now on; there must be one.
    ExtentId take(int group);
    // An extent that is nobody's is the group's from now on.
    void take(int group, ExtentId extent);
    void give_back(int group, ExtentId extent);
    // The clock by which groups compare when their blocks were used; it may wrap.
    uint32_t tick() { return ++clock_; }
    // Throws std::runtime_error on any disagreement.
    void check() const;

  private:
    std::vector<int> owners_;
    FreeSet free_;
    uint32_t clock_ = 0;
};

}  // namespace swiftkv
