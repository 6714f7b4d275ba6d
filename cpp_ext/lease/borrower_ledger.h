// The borrower's replica of one lender's table: which extents of a link it may use.
#pragma once

#include <span>
#include <vector>

#include "extent_set.h"

namespace swiftkv {

// An extent is none (not to be touched), held (to be used) or recalled (in use until what is there is drained).
// The epoch is the latest that was heard of. Every operation is O(log n) for each of the n extents that it names. Those
// that name extents throw std::invalid_argument, and change nothing, for an extent that the link does not have or that
// is named twice, and for what no lender or borrower that is right can say.
class BorrowerLedger {
  public:
    enum State : uint8_t { kNone, kHeld, kRecalled };

    struct Offered {
        std::vector<ExtentId> taken;  // held from now on
        Leases accepted;              // those, and those that were held before
    };
    struct Recalled {
        std::vector<ExtentId> to_drain;
        Leases returned;  // nothing of ours is there
    };

    explicit BorrowerLedger(int num_extents);

    int num_extents() const { return states_.size(); }
    int count(State state) const { return states_.count(state); }

    // A later epoch than the last known -> held.
    Offered on_offer(std::span<const ExtentId> extents, std::span<const Epoch> epochs);
    // held -> recalled where the epoch is the current one. A recall that overtook its offer makes the offer void.
    Recalled on_recall(std::span<const ExtentId> extents, std::span<const Epoch> epochs);
    // held or recalled -> none: drained, or given back unasked. Returns the epochs to return them at.
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
