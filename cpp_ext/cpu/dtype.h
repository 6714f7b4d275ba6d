#pragma once

#include <cstdint>

namespace swiftkv {

enum class DType : int { kF32 = 0, kBf16 = 1, kF16 = 2 };
inline constexpr int kNumDTypes = 3;

constexpr int64_t item_size(DType dtype) {
    return dtype == DType::kF32 ? 4 : 2;
}

}  // namespace swiftkv
