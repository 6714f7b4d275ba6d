#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace swiftkv {

// A row of the scheduler's plan: a 2-D copy of `count` layer blocks of one link at layer 0. Offsets count from the
// first byte of a pool. If it is staged, the local layer blocks are contiguous, and every layer uses the same ones.
struct Run {
    int64_t link;
    int64_t peer_offset_bytes;
    int64_t local_offset_bytes;
    int64_t count;
    int64_t staged;
};

// Runs of one KV group and one direction. A layer block is `width_bytes`, a whole block `block_bytes`.
struct Runs {
    std::span<const Run> runs;
    int64_t width_bytes = 0;
    int64_t block_bytes = 0;
};

// The start of a job (CLOCK_MONOTONIC) and the times of its two directions. Python reads these bytes as they are.
struct JobTiming {
    int64_t ticket;
    double begin_s;
    double to_peer_s;
    double from_peer_s;
    int64_t to_peer_bytes;
    int64_t from_peer_bytes;
};

struct CopyError : std::runtime_error {
    explicit CopyError(const std::string& message, std::optional<int64_t> failed_link = std::nullopt)
        : std::runtime_error(message), link(failed_link) {}

    std::optional<int64_t> link;  // the link of the run that cannot be copied
};

// Copies between the local pool and mapped peers: a FIFO queue of jobs with threads of its own. The threads may share a
// job's rows; the next job, and the second direction of the same job, begin when all of them are done.
// Every method may be called from any thread.
class CopyEngine {
  public:
    // The engine remembers the timings of the last `max_timings` jobs until they are taken.
    CopyEngine(std::span<std::byte> local, int num_threads, size_t max_timings);
    // Waits until all submitted jobs are done.
    ~CopyEngine();

    // These wait until no job is left, so that no job refers to a mapping that is removed.
    void set_space(int64_t link, std::span<std::byte> memory);
    void clear_space(int64_t link);

    // Submits a job: first all of `to_peer`, then all of `from_peer`, at one layer. Returns a ticket: 1, 2, 3...
    // If a run leaves its space, or its link has none, the ticket fails and nothing of the job is copied.
    int64_t submit(const Runs& to_peer, const Runs& from_peer, int64_t layer);

    // Waits for a job. Throws CopyError, once, if it failed; std::invalid_argument if there is no such ticket.
    void wait(int64_t ticket);
    // Waits for all jobs and forgets failures.
    void settle();

    std::vector<JobTiming> take_timings();

  private:
    // Rows of one copy, all within their spaces.
    struct Rows {
        std::byte* to;
        const std::byte* from;
        int64_t to_pitch;
        int64_t from_pitch;
        int64_t count;
        int64_t width;
    };
    // One direction of a job, divided into portions for one thread each: portion i ends before piece ends[i].
    struct Phase {
        std::vector<Rows> pieces;
        std::vector<size_t> ends;
        size_t taken = 0;
        size_t done = 0;
        int64_t num_bytes = 0;
        bool non_temporal = false;
        double begin_s = 0;
    };
    struct Job {
        std::array<Phase, 2> phases;
        size_t phase = 0;
        JobTiming timing{};
    };

    Phase make_phase(const Runs& runs, int64_t layer, bool to_peer) const;
    std::span<std::byte> place(std::span<std::byte> space, const char* name, int64_t offset, int64_t pitch,
                               const Runs& runs, const Run& run) const;
    void stop();
    void work();
    bool has_portion() const;
    void end_phase(Job& job);
    void advance();
    static void copy(const Phase& phase, size_t portion);

    const std::span<std::byte> local_;
    const size_t max_timings_;
    std::unordered_map<int64_t, std::span<std::byte>> spaces_;

    mutable std::mutex mutex_;  // guards everything below, and spaces_
    std::condition_variable work_ready_;
    std::condition_variable job_done_;
    std::deque<Job> jobs_;  // the first is being copied
    int64_t last_ticket_ = 0;
    int64_t last_done_ = 0;
    std::unordered_map<int64_t, CopyError> failed_;
    std::deque<JobTiming> timings_;
    bool stop_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace swiftkv
