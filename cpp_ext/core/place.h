// The places where blocks can lie, and the traits of each.
#pragma once

#include <array>
#include <cstdint>

namespace swiftkv {

// The places in order, from the top down. A cached block that must leave a place goes to one further down, or is
// forgotten. Of two copies of a block, the one further up is kept.
enum class Place : uint8_t { kLocal, kPeer, kHost };

struct PlaceTraits {
    const char* name;
    bool is_attended;  // attention reads blocks where they lie
    bool is_staged;    // a step that reads blocks stages them, one layer at a time
    bool is_lossless;  // blocks come back with the same bytes
    bool is_durable;   // blocks outlive the process
};
inline constexpr std::array kPlaces = {
    PlaceTraits{.name = "local", .is_attended = true, .is_staged = false, .is_lossless = true, .is_durable = false},
    PlaceTraits{.name = "peer", .is_attended = false, .is_staged = true, .is_lossless = true, .is_durable = false},
    PlaceTraits{.name = "host", .is_attended = false, .is_staged = true, .is_lossless = true, .is_durable = false},
};
inline constexpr int kNumPlaces = static_cast<int>(kPlaces.size());

constexpr const PlaceTraits& traits(Place place) {
    return kPlaces[static_cast<size_t>(place)];
}

}  // namespace swiftkv
