#include "prompt_race.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "admission_order.h"

namespace swiftkv {

namespace {

constexpr int kNumLanes = 33;
constexpr int kMaxTurns = 256;  // after so many, the wait is known well enough
constexpr double kNever = std::numeric_limits<double>::infinity();

int lane_of(const Racer& r) {
    return swiftkv::lane_of(static_cast<int>(r.num_left));
}

// Whether `a` goes before `b` after `time_s`.
bool goes_before(const Racer& a, const Racer& b, double time_s) {
    const double left = (a.waited_s + time_s) * b.num_left, right = (b.waited_s + time_s) * a.num_left;
    return left != right ? left > right : a.num_left < b.num_left;
}

// Returns the time for which `first`, computed at `speed` tokens a second, goes on from `time_s` before `other`
// interrupts it. That happens after a whole number of steps, once the ratio of `other`, `(waited_s + time_s + t) /
// num_left`, is as high as that of `first`, `(waited_s + time_s + t) / (num_left - speed * t)`.
double interrupted_after_s(const Racer& first, const Racer& other, double speed, double time_s, double step_s) {
    const double waited_s = first.waited_s + time_s, other_s = other.waited_s + time_s;
    const double linear = first.num_left - speed * other_s - other.num_left;
    const double constant = other.num_left * waited_s - other_s * first.num_left;
    if (linear <= 0 && constant >= 0) return kNever;
    const double discriminant = linear * linear - 4 * speed * constant;
    if (discriminant < 0) return kNever;
    const double root = std::sqrt(discriminant);
    const double from_s = (linear - root) / (2 * speed), until_s = (linear + root) / (2 * speed);
    const double after_s = step_s * std::max(std::ceil(from_s / step_s - 1e-9), 1.0);
    return after_s <= until_s ? after_s : kNever;
}

class Race {
  public:
    Race(std::span<Racer> others, const Racer& own, double begins_s, double step_s)
        : others_(others),
          own_(own),
          own_lane_(lane_of(own)),
          longest_of_lane_(std::ldexp(1.0, own_lane_)),
          step_s_(step_s),
          time_s_(begins_s) {
        line_up();
    }

    void run() {
        for (int i = 0; i < kMaxTurns; ++i) {
            forget_those_over();
            const size_t first = best();
            if (!racers_[first].racer) return;
            if (is_decided()) break;
            if (!racers_[first].now.has_begun) begin(first);
            compute(first);
        }
        for (Racer& other : others_)
            if (is_sure(other)) other.service_s = 0;
    }

  private:
    struct Running {
        Racer now;
        Racer* racer;  // null: it is the prompt that arrives
    };

    // Whether a racer goes before the arriving prompt at any time: it came earlier and is no longer.
    bool is_sure(const Racer& r) const { return r.num_left <= own_.num_left; }
    // Whether only racers that surely go before the arriving prompt are left.
    bool is_decided() const {
        return num_longer_of_lane_ == 0 &&
               std::ranges::all_of(racers_, [&](const Running& r) { return !r.racer || is_sure(r.now); });
    }
    size_t best() const {
        size_t best = 0;
        for (size_t i = 1; i < racers_.size(); ++i)
            if (goes_before(racers_[i].now, racers_[best].now, time_s_)) best = i;
        return best;
    }
    void forget_those_over() {
        for (size_t i = 0; i < racers_.size();) {
            if (is_over(racers_[i])) {
                racers_[i] = racers_.back();
                racers_.pop_back();
            } else {
                ++i;
            }
        }
    }
    // Whether a racer has ended, or no longer goes before any racer that goes before the arriving prompt: these have
    // higher ratios from now on, because they are shorter.
    bool is_over(const Running& r) const {
        if (!r.racer || is_sure(r.now)) return r.now.service_s <= 0;
        return r.now.num_left >= longest_of_lane_ &&
               (r.now.waited_s + time_s_) * longest_of_lane_ < time_s_ * r.now.num_left;
    }

    // Lines up the racers that have begun, and the first of each lane.
    void line_up() {
        std::array<Racer*, kNumLanes> heads{};
        for (auto r = others_.rbegin(); r != others_.rend(); ++r) {
            if (r->has_begun && r->service_s > 0) racers_.push_back({*r, &*r});
            if (r->has_begun) continue;
            const int lane = lane_of(*r);
            num_longer_of_lane_ += lane == own_lane_ && !is_sure(*r);
            Racer*& head = heads[lane];
            r->behind = head;
            head = &*r;
        }
        for (Racer* head : heads)
            if (head) racers_.push_back({*head, head});
        if (!heads[own_lane_]) racers_.push_back({own_, nullptr});
    }

    // Begins a racer; the next one of its lane lines up.
    void begin(size_t i) {
        racers_[i].now.has_begun = true;
        const Racer now = racers_[i].now;
        const bool is_of_own_lane = lane_of(now) == own_lane_;
        num_longer_of_lane_ -= is_of_own_lane && !is_sure(now);
        if (now.behind)
            racers_.push_back({*now.behind, now.behind});
        else if (is_of_own_lane)
            racers_.push_back({own_, nullptr});
    }

    // Computes a racer until it ends or is interrupted.
    void compute(size_t i) {
        auto& [now, racer] = racers_[i];
        double turn_s = now.service_s;
        if (turn_s > step_s_) {
            const double speed = now.num_left / now.service_s;
            for (size_t j = 0; j < racers_.size(); ++j)
                if (j != i)
                    turn_s = std::min(turn_s, interrupted_after_s(now, racers_[j].now, speed, time_s_, step_s_));
        }
        const double part = 1 - turn_s / now.service_s;
        time_s_ += turn_s;
        racer->num_left = now.num_left *= part;
        racer->service_s = now.service_s *= part;
    }

    const std::span<Racer> others_;
    const Racer& own_;
    const int own_lane_;
    const double longest_of_lane_;
    const double step_s_;
    double time_s_;
    std::vector<Running> racers_;
    int num_longer_of_lane_ = 0;  // longer prompts that wait before the arriving prompt in its lane
};

}  // namespace

void race(std::span<Racer> others, const Racer& own, double begins_s, double step_s) {
    Race(others, own, begins_s, step_s).run();
}

}  // namespace swiftkv
