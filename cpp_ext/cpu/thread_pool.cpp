#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "turns.h"

namespace swiftkv {
namespace {

constexpr std::chrono::microseconds kSpin{50};  // longer than most pauses of a step between two regions

thread_local int current_thread = -1;  // index inside a region, -1 outside

void pause() {
    __builtin_ia32_pause();
}

// Spins for at most kSpin; returns whether `ready` came true.
template <typename Ready>
bool spin_until(Ready ready) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 16; ++i) {
            if (ready()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    return false;
}

void wait_for_turn(Turns& turns, int thread) {
    if (thread == 0)
        turns.check_if_contended();
    else
        Turns::stand_still(thread);
}

struct Region {
    detail::RangeBody body;
    const void* context;
    int64_t n;
    int64_t grain;
    uint32_t num_chunks;
};

class ThreadPool {
  public:
    ThreadPool() = default;
    // Throws std::runtime_error if the system gives this process no more threads.
    explicit ThreadPool(int num_threads) : ThreadPool() {  // so that the destructor ends the threads that have begun
        try {
            for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i); });
        } catch (const std::system_error& error) {
            throw std::runtime_error("of " + std::to_string(num_threads) + " threads for computing, thread " +
                                     std::to_string(workers_.size() + 2) + " cannot be started: " + error.what() +
                                     "; allow more (ulimit -u, ulimit -v, the container's limits) or ask for fewer");
        }
    }

    ~ThreadPool() {
        stop_.store(true, std::memory_order_relaxed);
        wake_.fetch_add(1, std::memory_order_release);
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

    void run(const Region& region) {
        region_ = region;
        chunks_done_.store(0, std::memory_order_relaxed);
        tickets_.store(region.num_chunks, std::memory_order_release);
        wake_.fetch_add(1, std::memory_order_release);
        wake_.notify_all();
        take_chunks(0);
        const auto done = [&] { return chunks_done_.load(std::memory_order_acquire) == region.num_chunks; };
        if (spin_until(done)) return;
        for (uint32_t seen = chunks_done_.load(std::memory_order_acquire); seen != region.num_chunks;
             seen = chunks_done_.load(std::memory_order_acquire))
            chunks_done_.wait(seen, std::memory_order_acquire);
    }

  private:
    void work(int thread) {
        uint32_t seen = 0;
        while (true) {
            const auto woken = [&] { return wake_.load(std::memory_order_acquire) != seen; };
            if (!spin_until(woken)) wake_.wait(seen, std::memory_order_acquire);
            seen = wake_.load(std::memory_order_acquire);
            if (stop_.load(std::memory_order_relaxed)) return;
            take_chunks(thread);
        }
    }

    // A ticket that was taken keeps its region alive, because run() returns only after the chunk is counted as done. So
    // region_ is read after the exchange and never before.
    void take_chunks(int thread) {
        current_thread = thread;
        Turns* const turns = Turns::in_use();
        uint32_t left = tickets_.load(std::memory_order_acquire);
        while (left != 0) {
            if (turns != nullptr) wait_for_turn(*turns, thread);
            if (!tickets_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel, std::memory_order_acquire))
                continue;
            const Region& region = region_;
            const uint32_t num_chunks = region.num_chunks;
            const int64_t begin = static_cast<int64_t>(num_chunks - left) * region.grain;
            region.body(region.context, begin, std::min(begin + region.grain, region.n), thread);
            if (chunks_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_chunks) chunks_done_.notify_all();
            left = tickets_.load(std::memory_order_acquire);
        }
        current_thread = -1;
    }

    Region region_{};
    alignas(64) std::atomic<uint32_t> tickets_{0};  // chunks of the region that no thread has taken
    alignas(64) std::atomic<uint32_t> chunks_done_{0};
    alignas(64) std::atomic<uint32_t> wake_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

std::mutex pool_mutex;  // one region at a time
std::atomic<int> pool_size{1};

std::unique_ptr<ThreadPool>& pool() {
    static std::unique_ptr<ThreadPool>& instance = *new std::unique_ptr<ThreadPool>(std::make_unique<ThreadPool>());
    return instance;
}

}  // namespace

int num_threads() {
    return pool_size.load(std::memory_order_relaxed);
}

void set_num_threads(int n) {
    if (n < 1) throw std::invalid_argument("num_threads must be at least 1");
    std::lock_guard lock(pool_mutex);
    if (pool()->num_threads() == n) return;
    pool() = std::make_unique<ThreadPool>();  // ends the old threads first
    pool_size.store(1, std::memory_order_relaxed);
    pool() = std::make_unique<ThreadPool>(n);
    pool_size.store(n, std::memory_order_relaxed);
}

void detail::run_parallel(int64_t n, int64_t grain, RangeBody body, const void* context) {
    if (n <= 0) return;
    if (current_thread >= 0) return body(context, 0, n, current_thread);
    const int64_t num_chunks = (n + grain - 1) / grain;
    std::lock_guard lock(pool_mutex);
    if (Turns* const turns = Turns::in_use()) turns->check();
    if (num_chunks == 1 || pool()->num_threads() == 1) {
        current_thread = 0;
        body(context, 0, n, 0);
        current_thread = -1;
        return;
    }
    pool()->run({body, context, n, grain, static_cast<uint32_t>(num_chunks)});
}

}  // namespace swiftkv
