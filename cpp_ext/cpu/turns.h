#pragma once

#include <atomic>
#include <cstdint>

#include "shares.h"

// How the engine of this process takes turns with the others of its node. The thread pool asks between regions and
// between the chunks of a region; all threads then stand still until it is this engine's turn.
//
// An engine that dies or is stopped within its turn is not seen any more, and holds others up for kAbsentNs.
namespace swiftkv {

class Turns {
  public:
    // Maps the table behind `fd`, which stays the caller's. An engine of several ranks pays for all of them: each
    // computes as much as this one. Throws std::system_error if it cannot be mapped.
    Turns(int fd, int slot, const Share& share, int num_cores, int num_ranks);
    ~Turns();
    Turns(const Turns&) = delete;
    Turns& operator=(const Turns&) = delete;

    // The thread pool of this process asks these turns, if any, from now on.
    static void use(Turns* turns) { in_use_.store(turns, std::memory_order_release); }
    static Turns* in_use() { return in_use_.load(std::memory_order_acquire); }

    // A step lies between the two; outside of steps nothing waits. Called by one thread.
    void begin();
    void end();

    // For the thread that runs a region: waits for its turn.
    void check();
    void check_if_contended() {
        if (account_.is_contended()) check();
    }

    // For the other threads of the region: waits while that one waits.
    void stand_still() const {
        if (stands_still_.load(std::memory_order_relaxed)) stands_still_.wait(true);
    }

    double core_s() const { return static_cast<double>(core_ns_.load()) / 1e9; }      // in steps and between them
    double waited_s() const { return static_cast<double>(waited_ns_.load()) / 1e9; }  // for turns

  private:
    void charge();
    void wait_for_turn(int64_t began_ns);
    void wake_others();

    static std::atomic<Turns*> in_use_;

    ShareTable* table_;
    ShareAccount account_;
    int num_ranks_;
    int64_t charged_ns_;        // processor time of this process
    int64_t ask_again_ns_ = 0;  // monotonic
    std::atomic<bool> is_in_step_{false};
    std::atomic<bool> stands_still_{false};
    std::atomic<int64_t> core_ns_{0};
    std::atomic<int64_t> waited_ns_{0};
};

}  // namespace swiftkv
