// The places where blocks can lie, and the traits of each.
#pragma once

#include <array>
#include <cstdint>

namespace swiftkv {

// The places in order, from the top down. A cached block that must leave a place goes to one further down in which
// blocks are allocated, or is forgotten. Of two copies of a block, the one further up is kept.
//
// Host memory belongs to all engines of a node. Blocks get there by way of storage, and this engine attends to those
// that it has pinned.
enum class Place : uint8_t { kLocal, kPeer, kHost };

struct PlaceTraits {
    const char* name;
    bool is_attended;  // attention reads blocks where they lie
    bool is_allocated;  // blocks can be taken there
    bool is_staged;    // a step that reads blocks stages them, one layer at a time
};
inline constexpr std::array kPlaces = {
    PlaceTraits{.name = "local", .is_attended = true, .is_allocated = true, .is_staged = false},
    PlaceTraits{.name = "peer", .is_attended = false, .is_allocated = true, .is_staged = true},
    PlaceTraits{.name = "host", .is_attended = true, .is_allocated = false, .is_staged = false},
};
inline constexpr int kNumPlaces = static_cast<int>(kPlaces.size());

constexpr const PlaceTraits& traits(Place place) {
    return kPlaces[static_cast<size_t>(place)];
}

}  // namespace swiftkv
