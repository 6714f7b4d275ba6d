// Checks of lists of extents that come from outside.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace swiftkv {

using ExtentId = int32_t;

[[noreturn]] inline void refuse_extent(ExtentId extent, const char* why) {
    throw std::invalid_argument("extents: extent " + std::to_string(extent) + " " + why);
}

// Throws std::invalid_argument unless all are extents of a link with `num_extents` extents, and none is named twice.
inline void check_extents(std::span<const ExtentId> extents, int num_extents) {
    for (const ExtentId extent : extents) {
        if (extent < 0 || extent >= num_extents)
            throw std::invalid_argument("extents: the link has " + std::to_string(num_extents) +
                                        " extents, and no extent " + std::to_string(extent));
    }
    std::vector<ExtentId> sorted(extents.begin(), extents.end());
    std::sort(sorted.begin(), sorted.end());
    if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end())
        refuse_extent(*twice, "is named twice");
}

}  // namespace swiftkv
