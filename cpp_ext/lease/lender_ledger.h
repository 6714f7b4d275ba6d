// The lender's table of one link: the truth about who may write to an extent.
#pragma once

#include <span>
#include <vector>

#include "extent_set.h"

namespace swiftkv {

// The life of an extent:
//   home      the lender's own; nobody else writes to it
//   offered   the borrower may have it and may not know yet
//   lent      the borrower said that it has it
//   recalled  asked back; still the borrower's until it says that it is done
// Every offer has an epoch of its own, one more than the one before, so what is said of an earlier lease of the same
// extent is recognised, however late or often it comes. Every operation is O(log n) for each of the n
// extents that it names. Those that name extents throw std::invalid_argument, and change nothing, for an extent that
// the link does not have, that is named twice, or that has no epoch; offer() also unless all are home.
class LenderLedger {
  public:
    enum State : uint8_t { kHome, kOffered, kLent, kRecalled };

    explicit LenderLedger(int num_extents);

    int num_extents() const { return states_.size(); }
    int count(State state) const { return states_.count(state); }

    // home -> offered. Returns the epochs.
    std::vector<Epoch> offer(std::span<const ExtentId> extents);
    // offered -> lent where the epoch is the current one.
    void on_accept(std::span<const ExtentId> extents, std::span<const Epoch> epochs);
    // offered or lent -> recalled, as many as there are up to `count`. Returns them.
    Leases recall(int count);
    // offered, lent or recalled -> home where the epoch is the current one. Returns those.
    std::vector<ExtentId> on_return(std::span<const ExtentId> extents, std::span<const Epoch> epochs);
    // All -> home. Returns those that were not. Epochs go on, for nothing that was said before may count again.
    std::vector<ExtentId> peer_died();

    const std::vector<State>& states() const { return states_.all(); }
    const std::vector<Epoch>& epochs() const { return epochs_; }

  private:
    ExtentStates<State, 4> states_;
    std::vector<Epoch> epochs_;
    ExtentSet out_;  // offered or lent
    ExtentSet recalled_;
};

}  // namespace swiftkv
