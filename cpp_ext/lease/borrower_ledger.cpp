#include "borrower_ledger.h"

#include <algorithm>

namespace swiftkv {

BorrowerLedger::BorrowerLedger(int num_extents)
    : states_(num_extents, kNone), epochs_(num_extents, 0), borrowed_(num_extents) {}

BorrowerLedger::Offered BorrowerLedger::on_offer(std::span<const ExtentId> extents, std::span<const Epoch> epochs) {
    Offered offered;
    for (size_t i = 0; i < extents.size(); ++i) {
        const ExtentId extent = extents[i];
        const Epoch epoch = epochs[i];
        check_extent(extent, num_extents());
        if (epoch > epochs_[extent]) {
            // A lender offers anew only what came home, and it comes home only from here.
            if (states_[extent] != kNone) throw std::invalid_argument("an extent that is borrowed was offered anew");
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
    Recalled recalled;
    for (size_t i = 0; i < extents.size(); ++i) {
        const ExtentId extent = extents[i];
        const Epoch epoch = epochs[i];
        check_extent(extent, num_extents());
        if (epoch < epochs_[extent]) continue;
        if (states_[extent] == kNone) {
            epochs_[extent] = epoch;
            recalled.returned.add(extent, epoch);
        } else if (epoch > epochs_[extent]) {
            throw std::invalid_argument("an extent that is borrowed was recalled at a later epoch");
        } else if (states_[extent] == kHeld) {
            states_.set(extent, kRecalled);
            recalled.to_drain.push_back(extent);
        }
    }
    return recalled;
}

std::vector<Epoch> BorrowerLedger::give_back(std::span<const ExtentId> extents) {
    std::vector<Epoch> epochs;
    epochs.reserve(extents.size());
    for (const ExtentId extent : extents) {
        check_extent(extent, num_extents());
        if (states_[extent] == kNone) {
            throw std::invalid_argument("extent " + std::to_string(extent) + " is not borrowed");
        }
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
