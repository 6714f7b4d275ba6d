// The types that both ledgers use.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "../common/check.h"
#include "../common/extents.h"

namespace swiftkv {

// The number of times that an extent has been offered; 0: never.
using Epoch = uint32_t;

// The extents of a message, each with its epoch.
struct Leases {
    std::vector<ExtentId> extents;
    std::vector<Epoch> epochs;

    void add(ExtentId extent, Epoch epoch) {
        extents.push_back(extent);
        epochs.push_back(epoch);
    }
};

// Throws std::invalid_argument unless all are extents of the link, each is named once and each has an epoch.
inline void check_leases(std::span<const ExtentId> extents, std::span<const Epoch> epochs, int num_extents) {
    if (extents.size() != epochs.size())
        throw std::invalid_argument("extents, epochs: " + std::to_string(extents.size()) + " extents have " +
                                    std::to_string(epochs.size()) + " epochs");
    check_extents(extents, num_extents);
}

// A set of extents. Adding, removing and taking the last are O(1), and the order depends only on earlier operations.
class ExtentSet {
  public:
    explicit ExtentSet(int num_extents) : places_(num_extents, 0) {}

    int size() const { return static_cast<int>(members_.size()); }
    ExtentId last() const {
        ensure(!members_.empty(), "a set that has a last extent is not empty");
        return members_.back();
    }

    void add(ExtentId extent) {
        places_[extent] = size();
        members_.push_back(extent);
    }

    void remove(ExtentId extent) {
        const int place = places_[extent];
        ensure(place < size() && members_[place] == extent, "an extent that is removed is in the set");
        members_[place] = members_.back();
        places_[members_[place]] = place;
        members_.pop_back();
    }

    std::vector<ExtentId> take_all() { return std::exchange(members_, {}); }

  private:
    std::vector<ExtentId> members_;
    std::vector<int> places_;  // by extent: its index in members_; any number if it is no member
};

// The state of every extent of a link, and the number of extents in each of `N` states.
template <class State, size_t N>
class ExtentStates {
  public:
    ExtentStates(int num_extents, State first) : states_(num_extents, first) { counts_[first] = num_extents; }

    int size() const { return static_cast<int>(states_.size()); }
    int count(State state) const { return counts_[state]; }
    State operator[](ExtentId extent) const { return states_[extent]; }
    const std::vector<State>& all() const { return states_; }

    void set(ExtentId extent, State state) {
        --counts_[states_[extent]];
        ++counts_[state];
        states_[extent] = state;
    }

  private:
    std::vector<State> states_;
    std::array<int, N> counts_{};
};

}  // namespace swiftkv
