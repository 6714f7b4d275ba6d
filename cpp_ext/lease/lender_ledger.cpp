#include "lender_ledger.h"

#include <algorithm>

namespace swiftkv {

LenderLedger::LenderLedger(int num_extents)
    : states_(num_extents, kHome), epochs_(num_extents, 0), out_(num_extents), recalled_(num_extents) {}

std::vector<Epoch> LenderLedger::offer(std::span<const ExtentId> extents) {
    check_extents(extents, num_extents());
    for (const ExtentId extent : extents)
        if (states_[extent] != kHome) refuse_extent(extent, "is not home");
    std::vector<Epoch> epochs;
    epochs.reserve(extents.size());
    for (const ExtentId extent : extents) {
        states_.set(extent, kOffered);
        out_.add(extent);
        epochs.push_back(++epochs_[extent]);
    }
    return epochs;
}

void LenderLedger::on_accept(std::span<const ExtentId> extents, std::span<const Epoch> epochs) {
    check_leases(extents, epochs, num_extents());
    for (size_t i = 0; i < extents.size(); ++i) {
        const ExtentId extent = extents[i];
        if (epochs_[extent] == epochs[i] && states_[extent] == kOffered) states_.set(extent, kLent);
    }
}

Leases LenderLedger::recall(int count) {
    if (count < 0) throw std::invalid_argument("count must not be negative");
    Leases recalled;
    for (int i = std::min(count, out_.size()); i > 0; --i) {
        const ExtentId extent = out_.last();
        out_.remove(extent);
        recalled_.add(extent);
        states_.set(extent, kRecalled);
        recalled.add(extent, epochs_[extent]);
    }
    return recalled;
}

std::vector<ExtentId> LenderLedger::on_return(std::span<const ExtentId> extents, std::span<const Epoch> epochs) {
    check_leases(extents, epochs, num_extents());
    std::vector<ExtentId> home;
    for (size_t i = 0; i < extents.size(); ++i) {
        const ExtentId extent = extents[i];
        if (epochs_[extent] != epochs[i] || states_[extent] == kHome) continue;
        (states_[extent] == kRecalled ? recalled_ : out_).remove(extent);
        states_.set(extent, kHome);
        home.push_back(extent);
    }
    return home;
}

std::vector<ExtentId> LenderLedger::peer_died() {
    std::vector<ExtentId> home = out_.take_all();
    const std::vector<ExtentId> recalled = recalled_.take_all();
    home.insert(home.end(), recalled.begin(), recalled.end());
    for (const ExtentId extent : home) states_.set(extent, kHome);
    return home;
}

}  // namespace swiftkv
