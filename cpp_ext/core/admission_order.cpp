#include "admission_order.h"

#include <stdexcept>
#include <tuple>

namespace swiftkv {

namespace {

// By arrival.
class Fifo : public AdmissionOrder {
    double urgency(const Request& r, const Moment&) const override { return -static_cast<double>(r.arrival); }
};

class ShortestFirst : public AdmissionOrder {
    double rank(const Request& r) const override { return r.num_left(); }
    double urgency(const Request& r, const Moment&) const override { return -r.num_left(); }
    bool is_by_length() const override { return true; }
    bool interrupts_prompts() const override { return true; }
};

// By what is left to compute, or by arrival when the oldest goes first. Requests of one lane have about the same
// left, within a factor of two, so the one that arrived first goes first.
class ShortestAndOldestAlternately : public AdmissionOrder {
    int lane(const Request& r) const override { return lane_of(r.num_left()); }
    double urgency(const Request& r, const Moment& moment) const override {
        return -(moment.is_oldest_first ? static_cast<double>(r.arrival) : r.num_left());
    }
    bool is_by_length() const override { return true; }
    bool interrupts_prompts() const override { return true; }
};

class EarliestDeadlineFirst : public AdmissionOrder {
    double rank(const Request& r) const override { return r.deadline_s; }
    double urgency(const Request& r, const Moment&) const override { return -r.deadline_s; }
    bool interrupts_prompts() const override { return true; }
};

// By response ratio, (wait + service) / service, where the service time is proportional to what is left to compute.
// Lanes are those of ShortestAndOldestAlternately.
class HighestRatioFirst : public AdmissionOrder {
    int lane(const Request& r) const override { return lane_of(r.num_left()); }
    double urgency(const Request& r, const Moment& moment) const override {
        return (moment.now_s - r.arrival_s) / r.num_left();
    }
    bool is_by_length() const override { return true; }
    bool interrupts_prompts() const override { return true; }
};

}  // namespace

bool AdmissionOrder::goes_before(const Request& a, const Request& b, const Moment& moment) const {
    return std::tuple(a.priority, -urgency(a, moment), a.num_left(), a.arrival) <
           std::tuple(b.priority, -urgency(b, moment), b.num_left(), b.arrival);
}

SchedulingPolicy policy_named(const std::string& name) {
    if (name == "fcfs") return SchedulingPolicy::kFcfs;
    if (name == "priority") return SchedulingPolicy::kPriority;
    if (name == "spf") return SchedulingPolicy::kSpf;
    if (name == "hrrn") return SchedulingPolicy::kHrrn;
    if (name == "turns") return SchedulingPolicy::kTurns;
    if (name == "deadline") return SchedulingPolicy::kDeadline;
    throw std::invalid_argument("scheduling_policy is fcfs, priority, spf, hrrn, turns or deadline, not " + name);
}

std::unique_ptr<const AdmissionOrder> make_order(SchedulingPolicy policy) {
    switch (policy) {
        case SchedulingPolicy::kSpf:
            return std::make_unique<ShortestFirst>();
        case SchedulingPolicy::kHrrn:
            return std::make_unique<HighestRatioFirst>();
        case SchedulingPolicy::kTurns:
            return std::make_unique<ShortestAndOldestAlternately>();
        case SchedulingPolicy::kDeadline:
            return std::make_unique<EarliestDeadlineFirst>();
        case SchedulingPolicy::kFcfs:
        case SchedulingPolicy::kPriority:
            break;
    }
    return std::make_unique<Fifo>();
}

}  // namespace swiftkv
