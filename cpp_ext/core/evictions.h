// The times at which blocks were evicted last, to explain why a prompt found less in the cache than it could have.
#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "types.h"

namespace swiftkv {

// A bounded memory of evictions: a new one replaces an older one whose key has the same entry.
class Evictions {
  public:
    Evictions() : entries_(kNumEntries) {}

    void note(const BlockKey& key) noexcept { entries_[place(key)] = {key, Clock::now()}; }

    // The seconds since a block was evicted; nullopt if it was not, or if that is forgotten.
    std::optional<double> age_s(const BlockKey& key) const {
        const Entry& entry = entries_[place(key)];
        if (entry.key != key || entry.at == Clock::time_point{}) return std::nullopt;
        return std::chrono::duration<double>(Clock::now() - entry.at).count();
    }

  private:
    using Clock = std::chrono::steady_clock;
    struct Entry {
        BlockKey key = {};
        Clock::time_point at = {};
    };
    static constexpr size_t kNumEntries = size_t{1} << 16;
    static size_t place(const BlockKey& key) { return key[0] & (kNumEntries - 1); }  // a key is a hash already

    std::vector<Entry> entries_;
};

}  // namespace swiftkv
