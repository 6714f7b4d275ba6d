#pragma once

#include <functional>
#include <utility>
#include <vector>

// Kernel calls that wait for each other. Weights that pass through the caches drive the caller's interpreter out of
// them, so that 40 to 70 µs pass between one kernel and the next, in which the other threads have nothing to do. If all
// calls are made first, and run later in one loop, it is less than 1 µs.
namespace swiftkv {

class Deferral {
  public:
    // Has the kernel calls of this thread wait. Throws std::logic_error if they wait already.
    static void begin();
    // Runs the calls that wait, in the order in which they were made, and drops them; passes on what one of them
    // throws, and drops the later ones.
    static void run();
    // Drops the calls that wait, and has none wait any more.
    static void end();

    // Runs `call`, or has it wait. What it refers to must live until it has run.
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
