#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

// The threads of one engine. The calling thread takes part as thread 0, so num_threads() = workers + 1.
namespace swiftkv {

int num_threads();

// Joins the present workers and starts anew; must not run inside a parallel_for. Throws std::invalid_argument if n < 1,
// and std::runtime_error if the system refuses some of the threads; then the caller is the only one.
void set_num_threads(int n);

namespace detail {
using RangeBody = void (*)(const void* context, int64_t begin, int64_t end, int thread);
void run_parallel(int64_t n, int64_t grain, RangeBody body, const void* context);
}  // namespace detail

// Calls body(begin, end, thread) for chunks of at most `grain` that together cover [0, n), lower chunks first, and
// returns when all are done. A free thread takes the next chunk, so a worker that wakes late finds none left and delays
// nothing. The body must not throw. A parallel_for inside a body runs on the thread that calls it.
template <typename Body>
void parallel_for(int64_t n, Body&& body, int64_t grain = 1) {
    using Plain = std::remove_reference_t<Body>;
    detail::run_parallel(
        n, grain,
        [](const void* context, int64_t begin, int64_t end, int thread) {
            (*static_cast<Plain*>(const_cast<void*>(context)))(begin, end, thread);
        },
        std::addressof(body));
}

}  // namespace swiftkv
