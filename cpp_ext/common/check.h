// Checks of invariants, which run in every build.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <source_location>
#include <stdexcept>
#include <string>

namespace swiftkv {

[[noreturn, gnu::cold, gnu::noinline]] inline void end_process(const char* what, const std::source_location& where) {
    std::fprintf(stderr, "swiftkv: invariant broken: %s (%s:%u, %s)\n", what, where.file_name(), where.line(),
                 where.function_name());
    std::abort();
}

// Ends the process, with a message on standard error, unless `holds`. State changes call this before they write. The
// engine must not go on: with wrong state it would write where others keep their bytes, and an orderly shutdown would
// give back extents that copies still reach. When the process ends, its lenders get their extents back, and its
// supervisor restarts it.
inline void ensure(bool holds, const char* what, const std::source_location& where = std::source_location::current()) {
    if (!holds) [[unlikely]]
        end_process(what, where);
}

// Throws std::runtime_error unless `holds`. For check_invariants(), which changes nothing and may run at any time.
inline void check_that(bool holds, const char* what) {
    if (!holds) throw std::runtime_error(std::string("invariant broken: ") + what);
}

}  // namespace swiftkv
