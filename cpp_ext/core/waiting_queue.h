// The requests that wait, in an order that may change as they wait.
#pragma once

#include <compare>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "admission_order.h"
#include "fair_share.h"
#include "kv_cache.h"
#include "request.h"

namespace swiftkv {

// Keeps the requests of each flow in the lanes that the order assigns. Finding the first request takes time in
// proportion to the lanes of its priority, and each further one in proportion to its flows, however many requests wait.
class WaitingQueue {
  public:
    // Goes through the requests of a queue in order: by priority; within one, flows that are past their share come
    // last; within these, as the order says. It skips held requests. Requests that it has passed may leave the queue
    // meanwhile, and be charged to their flows.
    class Cursor {
      public:
        Cursor(const WaitingQueue& queue, const Moment& moment) : queue_(queue), moment_(moment) {}

        Request* next();  // null: there are no more

      private:
        // The next request of a lane, and a copy of what orders it: heads are compared far more often than they change.
        struct Head {
            double urgency;
            int num_left;
            uint64_t arrival;
            Request* request;

            bool goes_before(const Head& other) const;
        };
        // The lanes of one flow that have a next request.
        struct Lanes {
            int flow;
            Head first;
            std::vector<Head> others;

            void bring_first_forward();
        };

        bool open_next_priority();
        Head head_of(Request& request) const;
        std::vector<Lanes>::iterator next_lanes();

        const WaitingQueue& queue_;
        const Moment moment_;
        int64_t passed_priority_ = std::numeric_limits<int64_t>::min();
        std::vector<Lanes> flows_;  // of one priority
    };

    WaitingQueue(const KvCache& cache, const AdmissionOrder& order, FairShare& shares)
        : cache_(cache), order_(order), shares_(shares) {}

    void add(Request& request);
    void remove(Request& request);
    // Keeps a request of the queue from being next, or lets it be next again.
    void set_held(Request& request, bool is_held);
    size_t size() const { return size_; }
    int64_t first_priority() const { return lanes_.begin()->first.priority; }  // the queue must not be empty
    bool contains(Request& request) const;
    // Notes that `keys` are now cached: requests whose prompts continue with them have less to compute, and move to
    // other lanes. A call moves a few dozen requests, later calls the others. Does nothing unless the order compares
    // lengths.
    void note_cached(std::span<const BlockKey> keys);
    // Looks up again what the prefix cache has of the requests that may be next, because some of it may have been
    // evicted, and moves them to the lanes where they belong. These requests are the first of each lane that are not
    // held, in the lanes of the first priority, a few dozen at most. Does nothing unless the order compares lengths.
    void refresh();
    Cursor in_order(const Moment& moment) const { return Cursor(*this, moment); }
    // Returns all requests, lane by lane.
    std::vector<Request*> all() const;
    // Throws std::runtime_error if an invariant is violated.
    void check() const;

  private:
    struct Earlier {
        bool operator()(const Request* a, const Request* b) const;
    };
    using Lane = std::set<Request*, Earlier>;
    // Held requests have lanes of their own, so that looking for the next request does not walk past them.
    struct Key {
        int64_t priority;
        int flow, lane;
        bool is_held;
        auto operator<=>(const Key&) const = default;
    };
    // A request that would find more in the cache if the cache had this key.
    struct Awaiting {
        BlockKey key;
        uint64_t arrival;
        Request* request;
        auto operator<=>(const Awaiting&) const = default;
    };

    static Key key_of(const Request& r) { return {r.priority, r.flow, r.lane, r.is_held}; }
    void insert(Request& request);
    void erase(Request& request);
    void begin_waiting(const Request& request);
    bool is_looked_up(const Request& request) const;
    int num_known(const Request& request) const;
    bool refresh(Request& request);
    std::optional<Awaiting> awaiting(Request& request) const;
    Request* behind(Request& request) const;

    const KvCache& cache_;
    const AdmissionOrder& order_;
    FairShare& shares_;
    std::map<Key, Lane> lanes_;  // none is empty
    std::set<Awaiting> awaiting_;
    std::deque<BlockKey> news_;  // newly cached keys for which requests may still have to move
    size_t size_ = 0;
    int last_flow_ = 0;  // the flow of the request that left the queue last
};

}  // namespace swiftkv
