#pragma once

#include <functional>
#include <utility>
#include <vector>

// Defers kernel calls, to run several kernels in one loop without the Python interpreter between them. The weights that
// a kernel reads evict the interpreter from the caches. So 40 to 70 µs pass between two kernels that Python calls, in
// which the other threads have nothing to do. In the loop it is less than 1 µs.
namespace swiftkv {

class Deferral {
  public:
    // Defers the kernel calls of this thread from now on. Throws std::logic_error if they are deferred already.
    static void begin();
    // Runs the deferred calls in the order in which they were made. If one throws, drops the later ones and passes on
    // the exception.
    static void run();
    // Drops the deferred calls, and defers no more.
    static void end();

    // Runs `call`, or defers it. Everything that it refers to must live until it has run.
    template <typename Call>
    static void run_or_wait(Call&& call) {
        if (is_on_)
            waiting_.emplace_back(std::forward<Call>(call));
        else
            call();
    }

  private:
    static thread_local bool is_on_;
    static thread_local std::vector<std::function<void()>> waiting_;
};

}  // namespace swiftkv
