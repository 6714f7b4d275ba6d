// The places where blocks can lie.
#pragma once

#include <array>
#include <cstdint>

namespace swiftkv {

// The places in order, from the top down. Of two copies of a block, the one further up is kept.
//
// - Attention reads blocks in the local pool and in host memory where they lie.
// - Blocks of peers are borrowed. A cached local block that must leave its place goes there, or is forgotten. A step
// that
//   reads a borrowed block stages it, one layer at a time.
// - Host memory belongs to all engines of a node. Blocks get there by way of storage, and this engine reads those that
// it
//   has pinned.
enum class Place : uint8_t { kLocal, kPeer, kHost };

inline constexpr std::array kPlaceNames = {"local", "peer", "host"};
inline constexpr int kNumPlaces = static_cast<int>(kPlaceNames.size());

}  // namespace swiftkv
