// The borrower's replica of one lender's table: the extents of a link that it may use.
#pragma once

#include <span>
#include <vector>

#include "extent_set.h"

namespace swiftkv {

// An extent is none (must not be touched), held (may be used) or recalled (in use until it is drained). Its epoch is
// the latest that a message has named. Every operation takes O(log n) for each of the n extents that it names.
// Operations that name extents throw std::invalid_argument, and change nothing, if the link lacks an extent, if one is
// named twice, or for a message that a correct lender or borrower cannot send.
class BorrowerLedger {
  public:
    enum State : uint8_t { kNone, kHeld, kRecalled };

    struct Offered {
        std::vector<ExtentId> taken;  // held from now on
        Leases accepted;              // the taken ones, and those that were held before
    };
    struct Recalled {
        std::vector<ExtentId> to_drain;
        Leases returned;  // extents that hold nothing of ours
    };

    explicit BorrowerLedger(int num_extents);

    int num_extents() const { return states_.size(); }
    int count(State state) const { return states_.count(state); }

    // none -> held, if the epoch is later than the last known one.
    Offered on_offer(std::span<const ExtentId> extents, std::span<const Epoch> epochs);
    // held -> recalled, if the epoch is the current one. A recall that overtakes its offer makes the offer void.
    Recalled on_recall(std::span<const ExtentId> extents, std::span<const Epoch> epochs);
    // held or recalled -> none, for extents that are drained or given back unasked. Returns their epochs, for the
    // message.
    std::vector<Epoch> give_back(std::span<const ExtentId> extents);
    // Forgets everything, the epochs too. Returns the extents that were held or recalled.
    std::vector<ExtentId> lender_died();

    const std::vector<State>& states() const { return states_.all(); }
    const std::vector<Epoch>& epochs() const { return epochs_; }

  private:
    ExtentStates<State, 3> states_;
    std::vector<Epoch> epochs_;
    ExtentSet borrowed_;  // held or recalled
};

}  // namespace swiftkv
