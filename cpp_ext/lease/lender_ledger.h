// The lender's table of one link, which decides which engine may write to an extent.
#pragma once

#include <span>
#include <vector>

#include "extent_set.h"

namespace swiftkv {

// The life of an extent:
//   home      the lender's own: no other engine writes to it
//   offered   the borrower may have it, and may not know that yet
//   lent      the borrower has accepted it
//   recalled  the lender has asked for it; it is the borrower's until the borrower returns it
// Every offer has its own epoch, one more than the previous one, so a message about an earlier lease of the same extent
// is recognised, however late or often it comes. Every operation takes O(log n) for each of the n extents that it
// names. Operations that name extents throw std::invalid_argument, and change nothing, if the link lacks an extent, or
// if one is named twice or has no epoch; offer() also unless all are home.
class LenderLedger {
  public:
    enum State : uint8_t { kHome, kOffered, kLent, kRecalled };

    explicit LenderLedger(int num_extents);

    int num_extents() const { return states_.size(); }
    int count(State state) const { return states_.count(state); }

    // home -> offered. Returns the epochs.
    std::vector<Epoch> offer(std::span<const ExtentId> extents);
    // offered -> lent, if the epoch is the current one.
    void on_accept(std::span<const ExtentId> extents, std::span<const Epoch> epochs);
    // offered or lent -> recalled, for up to `count` extents. Returns them.
    Leases recall(int count);
    // offered, lent or recalled -> home, if the epoch is the current one. Returns the extents that came home.
    std::vector<ExtentId> on_return(std::span<const ExtentId> extents, std::span<const Epoch> epochs);
    // All -> home. Returns the extents that were not. Epochs go on, so that earlier messages never count again.
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
