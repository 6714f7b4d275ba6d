// Which of the waiting requests goes first.
#pragma once

#include <bit>
#include <memory>
#include <string>

#include "request.h"

namespace swiftkv {

// Orders requests of equal priority; a lower priority always goes first. Requests of one lane keep their order whatever
// the time, so that of many thousand only the first of each lane need be compared.
class AdmissionOrder {
  public:
    virtual ~AdmissionOrder() = default;

    virtual int lane(const Request&) const { return 0; }
    // Within a lane the lower rank goes first, then the earlier arrival.
    virtual double rank(const Request&) const { return 0; }
    // Between lanes the higher urgency goes first, then the request with less left to compute, then the earlier
    // arrival.
    virtual double urgency(const Request&, double /*now_s*/) const { return 0; }
    // Whether it depends on what requests have left to compute.
    virtual bool is_by_length() const { return false; }

    // Whether those that wait may go before prompts of their own class and flow that are computed in part.
    virtual bool interrupts_prompts() const { return false; }

    // Whether `a` goes before `b` at this time.
    bool goes_before(const Request& a, const Request& b, double now_s) const;
};

// The lane of `hrrn`: lengths of one lane are within a factor of two, and those of lane n are below 2^n.
constexpr int lane_of(int num_left) {
    return std::bit_width(static_cast<unsigned>(num_left));
}

// Throws std::invalid_argument.
SchedulingPolicy policy_named(const std::string& name);
std::unique_ptr<const AdmissionOrder> make_order(SchedulingPolicy policy);

}  // namespace swiftkv
