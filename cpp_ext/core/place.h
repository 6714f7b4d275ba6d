// Names the places where blocks can lie, and says what each is like.
#pragma once

#include <array>
#include <cstdint>

namespace swiftkv {

// In order: a cached block that must leave a place goes to one further down, or is forgotten; of two copies of a block
// the one further up is kept.
enum class Place : uint8_t { kLocal, kPeer, kHost };

struct PlaceTraits {
    const char* name;
    bool is_attended;  // attention reads blocks where they lie
    bool is_staged;    // a step that reads blocks stages them, one layer at a time
    bool is_lossless;  // blocks come back with the bytes with which they went
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
