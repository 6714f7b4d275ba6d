// A set of small integers that finds its lowest and highest member in a few instructions.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "../common/check.h"

namespace swiftkv {

// A bitmap with summaries: bit i of level k + 1 says whether word i of level k is not zero. Lowest-first allocation
// keeps runs of consecutive blocks long and the end of the pool free.
class FreeSet {
  public:
    explicit FreeSet(int size) : size_(size) {
        for (int bits = size;; bits = words(bits)) {
            levels_.emplace_back(words(bits), 0);
            if (bits < kBits) break;  // with a full last word, `highest_below` would have no bit for the end
        }
    }

    int count() const { return count_; }
    bool empty() const { return count_ == 0; }
    bool contains(int i) const { return i >= 0 && i < size_ && (levels_[0][i / kBits] >> (i % kBits) & 1); }

    void insert(int i) {
        ensure(i >= 0 && i < size_ && !contains(i), "a number that is added is not in the set");
        ++count_;
        for (auto& level : levels_) {
            uint64_t& word = level[i / kBits];
            const bool was_empty = word == 0;
            word |= uint64_t{1} << (i % kBits);
            if (!was_empty) return;
            i /= kBits;
        }
    }

    void erase(int i) {
        ensure(contains(i), "a number that is removed is in the set");
        --count_;
        for (auto& level : levels_) {
            uint64_t& word = level[i / kBits];
            word &= ~(uint64_t{1} << (i % kBits));
            if (word != 0) return;
            i /= kBits;
        }
    }

    // The lowest member; -1 if there is none.
    int lowest() const {
        if (empty()) return -1;
        int i = 0;
        for (auto level = levels_.rbegin(); level != levels_.rend(); ++level)
            i = i * kBits + std::countr_zero((*level)[i]);
        return i;
    }

    // The highest member below `end`; -1 if there is none.
    int highest_below(int end) const {
        for (size_t k = 0; k < levels_.size(); ++k, end /= kBits) {
            const size_t word = end / kBits;
            const uint64_t mask = (uint64_t{1} << (end % kBits)) - 1;
            const uint64_t below = word < levels_[k].size() ? levels_[k][word] & mask : 0;
            if (below == 0) continue;
            int i = end / kBits * kBits + kBits - 1 - std::countl_zero(below);
            while (k-- > 0) i = i * kBits + kBits - 1 - std::countl_zero(levels_[k][i]);
            return i;
        }
        return -1;
    }

  private:
    static constexpr int kBits = 64;
    static int words(int bits) { return (bits + kBits - 1) / kBits; }

    std::vector<std::vector<uint64_t>> levels_;
    int size_;
    int count_ = 0;
};

}  // namespace swiftkv
