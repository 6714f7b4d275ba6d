#include "borrower_ledger.h"

#include <algorithm>

namespace swiftkv {

BorrowerLedger::BorrowerLedger(int num_extents)
    : states_(num_extents, kNone), epochs_(num_extents, 0), borrowed_(num_extents) {}

BorrowerLedger::Offered BorrowerLedger::on_offer(std::span<const ExtentId> extents, std::span<const Epoch> epochs) {
    check_leases(extents, epochs, num_extents());
    // A lender offers an extent again only after it has come home, and only give_back() sends it home.
    for (size_t i = 0; i < extents.size(); ++i)
        if (epochs[i] > epochs_[extents[i]] && states_[extents[i]] != kNone)
            refuse_extent(extents[i], "is borrowed, and was offered anew");
    Offered offered;
    for (size_t i = 0; i < extents.size(); ++i) {
        const ExtentId extent = extents[i];
        const Epoch epoch = epochs[i];
        if (epoch > epochs_[extent]) {
            states_.set(extent, kHeld);
            epochs_[extent] = epoch;
            borrowed_.add(extent);
            offered.taken.push_back(extent);
        } else if (epoch < epochs_[extent] || states_[extent] != kHeld) {
            continue;
        }
        offered.accepted.add(extent, epoch);
    }
    return offered;
}

BorrowerLedger::Recalled BorrowerLedger::on_recall(std::span<const ExtentId> extents, std::span<const Epoch> epochs) {
    check_leases(extents, epochs, num_extents());
    for (size_t i = 0; i < extents.size(); ++i)
        if (epochs[i] > epochs_[extents[i]] && states_[extents[i]] != kNone)
            refuse_extent(extents[i], "is borrowed, and was recalled at a later epoch");
    Recalled recalled;
    for (size_t i = 0; i < extents.size(); ++i) {
        const ExtentId extent = extents[i];
        const Epoch epoch = epochs[i];
        if (epoch < epochs_[extent]) continue;
        if (states_[extent] == kNone) {
            epochs_[extent] = epoch;
            recalled.returned.add(extent, epoch);
        } else if (states_[extent] == kHeld) {
            states_.set(extent, kRecalled);
            recalled.to_drain.push_back(extent);
        }
    }
    return recalled;
}

std::vector<Epoch> BorrowerLedger::give_back(std::span<const ExtentId> extents) {
    check_extents(extents, num_extents());
    for (const ExtentId extent : extents)
        if (states_[extent] == kNone) refuse_extent(extent, "is not borrowed");
    std::vector<Epoch> epochs;
    epochs.reserve(extents.size());
    for (const ExtentId extent : extents) {
        borrowed_.remove(extent);
        states_.set(extent, kNone);
        epochs.push_back(epochs_[extent]);
    }
    return epochs;
}

std::vector<ExtentId> BorrowerLedger::lender_died() {
    std::vector<ExtentId> lost = borrowed_.take_all();
    for (const ExtentId extent : lost) states_.set(extent, kNone);
    std::fill(epochs_.begin(), epochs_.end(), 0);
    return lost;
}

}  // namespace swiftkv
