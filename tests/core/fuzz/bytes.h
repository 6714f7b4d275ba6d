// The input of a history: bytes, read one by one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace swiftkv::fuzz {

class Bytes {
  public:
    explicit Bytes(std::span<const uint8_t> bytes) : bytes_(bytes) {}

    bool empty() const { return at_ >= bytes_.size(); }
    // Returns the next byte; 0 past the end, so that every prefix of an input is an input.
    int next() { return empty() ? 0 : bytes_[at_++]; }
    // Returns a number from `low` to `high`.
    int between(int low, int high) { return low + next() % (high - low + 1); }

  private:
    std::span<const uint8_t> bytes_;
    size_t at_ = 0;
};

}  // namespace swiftkv::fuzz
