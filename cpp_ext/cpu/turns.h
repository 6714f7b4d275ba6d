#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

#include "shares.h"

// Shares the cores of a node between the engine of this process and the others. The thread pool asks before each region
// and between the chunks of a region. As many threads go on as there are cores for this engine, and its other threads
// stand still. If there are no cores, all of them stand still until it is this engine's turn.
//
// An engine that dies or is stopped within its turn holds others up for kAbsentNs.
namespace swiftkv {

class Turns {
  public:
    // Maps the table at `fd`, which stays the caller's. An engine of several ranks is charged for all of them: each
    // computes as much as this one, on all of its threads at once or on none. Throws std::system_error if the table
    // cannot be mapped.
    Turns(int fd, int account, int32_t threads, double weight, double max_share, int num_cores, int num_ranks);
    ~Turns();
    Turns(const Turns&) = delete;
    Turns& operator=(const Turns&) = delete;

    // Makes the thread pool of this process ask these turns from now on; null: none.
    static void use(Turns* turns) { in_use_.store(turns, std::memory_order_release); }
    static Turns* in_use() { return in_use_.load(std::memory_order_acquire); }

    // Mark the begin and the end of a step; outside of steps nothing waits. Called by one thread.
    void begin();
    void end();

    // Waits for the engine's turn. For the thread that runs a region.
    void check();
    void check_if_contended() {
        if (account_.is_contended() || !has_all_cores()) check();
    }

    // Waits while there is no core for this thread. For the other threads of the region.
    static void stand_still(int thread) {
        for (int32_t threads = threads_; thread >= threads; threads = threads_) threads_.wait(threads);
    }

    double core_s() const { return static_cast<double>(core_ns_.load()) / 1e9; }      // in steps and between them
    double waited_s() const { return static_cast<double>(waited_ns_.load()) / 1e9; }  // for turns

  private:
    void charge();
    Permit wait_for_turn(int64_t began_ns);
    void wake_others();
    void let_go_on(int32_t threads);
    bool has_all_cores() const { return cores_ >= num_threads_; }

    static constexpr int32_t kAll = std::numeric_limits<int32_t>::max();
    static std::atomic<Turns*> in_use_;
    static std::atomic<int32_t> threads_;  // how many go on; outlives this object, because threads may wait on it

    ShareTable* table_;
    ShareAccount account_;
    int32_t num_threads_;
    int32_t cores_;  // of the latest permit
    int num_ranks_;
    int64_t charged_ns_;        // processor time of this process
    int64_t ask_again_ns_ = 0;  // monotonic
    std::atomic<bool> is_in_step_{false};
    std::atomic<int64_t> core_ns_{0};
    std::atomic<int64_t> waited_ns_{0};
};

// Shares one GPU between the engine of this process and the others that use it: one of them at a time launches steps,
// and is charged for the time that they take. Called by one thread.
//
// An engine that dies or is stopped while it has its turn holds others up for kLongestWaitNs.
class DeviceTurns {
  public:
    // Maps the table at `fd`, which stays the caller's. Throws std::system_error if it cannot be mapped.
    DeviceTurns(int fd, int account, double weight, double max_share);
    ~DeviceTurns();
    DeviceTurns(const DeviceTurns&) = delete;
    DeviceTurns& operator=(const DeviceTurns&) = delete;

    // Waits for the engine's turn. Its steps that were launched before should have been charged.
    void wait();
    // Charges the engine for a step that has ended.
    void charge(int64_t device_ns);
    // Notes that the engine has no step to launch.
    void rest();

    // Whether another engine wants the GPU, or this one may not have all of it.
    bool is_contended() const { return account_.is_contended(); }

    double device_s() const { return static_cast<double>(device_ns_) / 1e9; }
    double waited_s() const { return static_cast<double>(waited_ns_) / 1e9; }

  private:
    ShareTable* table_;
    ShareAccount account_;
    int64_t device_ns_ = 0;
    int64_t waited_ns_ = 0;
};

}  // namespace swiftkv
