// The requests of a scheduler: which wait, which run, and in which row slot.
#pragma once

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "demand.h"
#include "fair_share.h"
#include "kv_cache.h"
#include "policy.h"
#include "request.h"
#include "waiting_queue.h"

namespace swiftkv {

// Keeps every request either waiting, without blocks, or running, in a row slot of its own.
class Roster {
  public:
    Roster(KvCache& cache, Demand& demand, const AdmissionOrder& order, FairShare& shares, int max_num_seqs);

    const WaitingQueue& waiting() const { return waiting_; }
    // Tells the waiting queue which keys have entered the prefix cache.
    void note_cached() { waiting_.note_cached(cache_.take_news()); }
    // Looks up again what the prefix cache has of the requests that may be next.
    void refresh_waiting() { waiting_.refresh(); }
    const std::vector<Request*>& running() const { return running_; }  // in Policy::Order
    int num_running() const { return static_cast<int>(running_.size()); }
    bool is_empty() const { return requests_.empty(); }
    bool has_free_slot() const { return !free_slots_.empty(); }
    Request* find(RequestId id) const;  // null: unknown
    std::vector<BlockTable*> running_tables() const;
    // Whether a running request waits for the room of blocks that are loading: then no more of them begin to load.
    bool awaits_loads() const;

    // Adds a request that arrives now; it waits.
    void add(std::unique_ptr<Request> request);
    // Keeps a request from being admitted while it waits, now or later, or lets it be admitted.
    void set_held(Request& request, bool is_held);
    // Forgets a request, which waits or runs.
    void erase(Request& request);
    // Lets a waiting request run, in the lowest free row slot.
    void start(Request& request);
    // Sends a running request back to wait: it lets go of its blocks and keeps its sampled tokens.
    void preempt(Request& request);
    // Does the same in favour of a request of a higher class.
    void displace(Request& request);

    // The number of preempted requests that no plan has named yet.
    int num_preempted() const { return static_cast<int>(preempted_.size()); }
    std::vector<RequestId> take_preempted() { return std::exchange(preempted_, {}); }
    int64_t num_preemptions_total() const { return num_preemptions_total_; }
    // The preemptions in favour of a higher class, by the class of the displaced request.
    const CountByClass& num_displaced_total() const { return num_displaced_total_; }
    // The number of times that a request has begun to run.
    int64_t num_begun() const { return num_begun_; }

    // Throws std::runtime_error if an invariant is violated.
    void check(int max_num_seqs) const;

  private:
    void enqueue(Request& request) noexcept;
    void dequeue(Request& request);
    void stop(Request& request);

    KvCache& cache_;
    Demand& demand_;
    std::unordered_map<RequestId, std::unique_ptr<Request>> requests_;
    WaitingQueue waiting_;
    std::vector<Request*> running_;
    std::vector<int> free_slots_;  // a heap with the lowest on top
    std::vector<RequestId> preempted_;
    uint64_t num_arrived_ = 0;
    int64_t num_begun_ = 0;
    int64_t num_preemptions_total_ = 0;
    CountByClass num_displaced_total_{};
};

}  // namespace swiftkv
