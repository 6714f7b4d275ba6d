// For check_invariants(): a broken invariant is reported, also in release builds.
#pragma once

#include <stdexcept>
#include <string>

namespace swiftkv {

inline void check_that(bool holds, const char* what) {
    if (!holds) throw std::runtime_error(std::string("invariant broken: ") + what);
}

}  // namespace swiftkv
