// The order in which waiting requests are admitted.
#pragma once

#include <bit>
#include <memory>
#include <string>

#include "request.h"

namespace swiftkv {

// The moment at which waiting requests are compared, and whether the oldest one goes first then under the policy
// `turns`.
struct Moment {
    double now_s;
    bool is_oldest_first = false;
};

// Alternates between the request that has waited longest and the shortest ones, so that both get equally many tokens
// computed. No request then waits much longer than twice its wait in order of arrival.
class Alternation {
  public:
    Moment at(double now_s) const { return {now_s, oldest_lack_tokens_ > 0}; }
    // Notes that a request with `num_tokens` tokens left to compute was admitted.
    void take(const Moment& moment, int num_tokens) {
        oldest_lack_tokens_ += moment.is_oldest_first ? -num_tokens : num_tokens;
    }

  private:
    int64_t oldest_lack_tokens_ = 0;  // how many tokens fewer the oldest requests got than the shortest ones
};

// Orders requests of equal priority; a lower priority always goes first. The order within a lane does not change with
// time, so only the first requests of the lanes need be compared.
class AdmissionOrder {
  public:
    virtual ~AdmissionOrder() = default;

    virtual int lane(const Request&) const { return 0; }
    // Within a lane the lower rank goes first, then the earlier arrival.
    virtual double rank(const Request&) const { return 0; }
    // Between lanes the higher urgency goes first, then the request with less left to compute, then the earlier
    // arrival.
    virtual double urgency(const Request&, const Moment&) const { return 0; }
    // Whether the order depends on what requests have left to compute.
    virtual bool is_by_length() const { return false; }

    // Whether waiting requests may go before prompts of their own class and flow that are computed in part.
    virtual bool interrupts_prompts() const { return false; }

    // Whether `a` goes before `b` at this moment.
    bool goes_before(const Request& a, const Request& b, const Moment& moment) const;
};

// Returns the lane of a request under `hrrn` and `turns`: lengths in lane n are below 2^n and at least half of that.
constexpr int lane_of(double num_left) {
    return std::bit_width(static_cast<unsigned>(num_left));
}

// Throws std::invalid_argument for an unknown name.
SchedulingPolicy policy_named(const std::string& name);
std::unique_ptr<const AdmissionOrder> make_order(SchedulingPolicy policy);

}  // namespace swiftkv
