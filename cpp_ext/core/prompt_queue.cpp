#include "prompt_queue.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "admission_order.h"
#include "prompt_race.h"

namespace swiftkv {

namespace {

constexpr size_t kRecent = 512;
constexpr double kMaxOvertakingPart = 0.9;
constexpr double kPartOfTurns = 0.5;  // of the time, when prompts take turns with the oldest
constexpr double kNoTime = 1e-9;      // counts as 0 seconds, or 0 tokens
constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

double PromptPace::step_s() const {
    return overhead_s + std::min(spare_s, budget * token_s);
}

double PromptPace::steps(const QueuedPrompt& prompt, double work_s) const {
    return std::max(prompt.num_computed() / budget, work_s / spare_s);
}

double PromptPace::computing_s(const QueuedPrompt& prompt) const {
    const double work_s = this->work_s(prompt);
    return work_s + std::ceil(steps(prompt, work_s) - 1e-9) * overhead_s;
}

// The first token takes `first_s`, and each one `more_s` more than the one before it.
double PromptPace::num_done(const QueuedPrompt& prompt, double done_s) const {
    const bool fills_time = work_s(prompt) / spare_s > prompt.num_computed() / budget;
    const double stretch = fills_time ? 1 + overhead_s / spare_s : 1;
    const double more_s = pair_s * stretch;
    const double first_s = token_s * stretch + more_s * (prompt.num_tokens - prompt.num_computed()) +
                           (fills_time ? 0 : overhead_s / budget);
    const double next_s = std::sqrt(first_s * first_s + 2 * more_s * done_s);
    return 2 * done_s / std::max(first_s + next_s, kNoTime);
}

size_t PromptQueue::index_of(RequestId id) const {
    return static_cast<size_t>(std::ranges::lower_bound(entries_, id, {}, &Entry::id) - entries_.begin());
}

bool PromptQueue::contains(RequestId id) const {
    const size_t index = index_of(id);
    return index < entries_.size() && entries_[index].id == id;
}

void PromptQueue::add(RequestId id, const QueuedPrompt& prompt) {
    if (contains(id)) throw std::invalid_argument("the prompt is there already");
    entries_.insert(entries_.begin() + static_cast<ptrdiff_t>(index_of(id)), {id, prompt});
    if (latest_.size() < kRecent)
        latest_.push_back(prompt);
    else
        latest_[num_added_ % kRecent] = prompt;
    ++num_added_;
}

void PromptQueue::begin(RequestId id, double num_left) {
    if (!contains(id)) return;
    QueuedPrompt& prompt = entries_[index_of(id)].prompt;
    prompt.num_left = num_left;
    prompt.num_coming = 0;
    if (!prompt.has_begun) begun_.push_back(id);
    prompt.has_begun = true;
}

void PromptQueue::expect(RequestId id, double num_left, double num_coming) {
    if (!contains(id)) return;
    QueuedPrompt& prompt = entries_[index_of(id)].prompt;
    if (prompt.has_begun) return;
    prompt.num_left = num_left;
    prompt.num_coming = num_coming;
}

void PromptQueue::remove(RequestId id) {
    if (!contains(id)) return;
    std::erase(begun_, id);
    entries_.erase(entries_.begin() + static_cast<ptrdiff_t>(index_of(id)));
}

std::optional<QueuedPrompt> PromptQueue::find(RequestId id) const {
    return contains(id) ? std::optional(entries_[index_of(id)].prompt) : std::nullopt;
}

void PromptQueue::advance(double now_s, const PromptPace* pace) {
    double elapsed_s = now_s - advanced_s_;
    advanced_s_ = now_s;
    while (pace && elapsed_s > 0) {
        QueuedPrompt* first = head(now_s, *pace);
        if (!first) return;
        const double taken_s = std::min(elapsed_s, rest_of(*first, *pace).service_s);
        first->done_s += taken_s;
        elapsed_s -= taken_s;
    }
}

bool PromptQueue::interrupts() const {
    return policy_ != SchedulingPolicy::kFcfs && policy_ != SchedulingPolicy::kPriority;
}

// Returns the prompt that goes first of those that have begun and are not yet computed; null if there is none.
QueuedPrompt* PromptQueue::head(double now_s, const PromptPace& pace) {
    const auto order_of = [&](const QueuedPrompt& prompt, double num_left) {
        double rank = (prompt.arrived_s - now_s) / num_left;
        if (policy_ == SchedulingPolicy::kDeadline) rank = prompt.deadline_s;
        if (policy_ == SchedulingPolicy::kSpf || policy_ == SchedulingPolicy::kTurns) rank = num_left;
        return std::tuple(prompt.priority, rank);
    };
    QueuedPrompt* first = nullptr;
    std::tuple<int64_t, double> least;
    for (RequestId id : begun_) {
        QueuedPrompt& prompt = entries_[index_of(id)].prompt;
        const Rest rest = rest_of(prompt, pace);
        if (rest.service_s <= kNoTime) continue;
        if (!interrupts()) return &prompt;
        const auto own = order_of(prompt, rest.num_left);
        if (first && own >= least) continue;
        first = &prompt;
        least = own;
    }
    return first;
}

double PromptQueue::end_of_class(int64_t priority) const {
    if (policy_ == SchedulingPolicy::kFcfs) return kInfinity;
    const double steps = std::floor(static_cast<double>(priority) / kPrioritiesPerClass + 0.5);
    return (steps + 0.5) * kPrioritiesPerClass;
}

WorkAhead PromptQueue::ahead_of(const QueuedPrompt& prompt, const PromptPace& pace) const {
    std::vector<Rest> all = rests(pace);
    order(prompt, pace, all);
    const std::vector<double> share = shares(prompt, pace.service_s(prompt), all);
    const double end = end_of_class(prompt.priority);
    WorkAhead ahead;
    for (size_t i = 0; i < entries_.size(); ++i) {
        const QueuedPrompt& other = entries_[i].prompt;
        const Rest& rest = all[i];
        const double part_ahead = rest.before * share[i];
        ahead.steps += rest.steps * part_ahead;
        ahead.work_s += rest.work_s * part_ahead;
        ahead.steps_behind += rest.steps * (1 - rest.before);
        ahead.work_behind_s += rest.work_s * (1 - rest.before);
        if (rest.before > 0 && !other.has_begun) {
            ahead.num_waiting += share[i];
            ahead.tokens_waiting += other.num_computed() * share[i];
        }
        ahead.num_begun += other.has_begun && static_cast<double>(other.priority) < end;
    }
    return ahead;
}

std::vector<PromptQueue::Rest> PromptQueue::rests(const PromptPace& pace) const {
    std::vector<Rest> rests(entries_.size());
    for (size_t i = 0; i < rests.size(); ++i) rests[i] = rest_of(entries_[i].prompt, pace);
    return rests;
}

PromptQueue::Rest PromptQueue::rest_of(const QueuedPrompt& prompt, const PromptPace& pace) const {
    const double work_s = pace.work_s(prompt), steps = pace.steps(prompt, work_s);
    const double service_s = work_s + steps * pace.overhead_s;
    if (prompt.done_s == 0) return {prompt.num_left, steps, work_s, service_s, 0.0};
    const double done_s = std::min(prompt.done_s, service_s), part = 1 - done_s / std::max(service_s, kNoTime);
    const double num_left = std::max(prompt.num_left - pace.num_done(prompt, done_s), kNoTime);
    return {num_left, steps * part, work_s * part, service_s * part, 0.0};
}

// Sets `before` of each rest: the part that is computed before the prompt.
void PromptQueue::order(const QueuedPrompt& prompt, const PromptPace& pace, std::vector<Rest>& rests) const {
    if (policy_ == SchedulingPolicy::kHrrn) return order_by_ratio(prompt, pace, rests);
    if (policy_ == SchedulingPolicy::kTurns) return order_by_turns(prompt, rests);
    const double end = end_of_class(prompt.priority);
    const auto is_ahead = [&](const QueuedPrompt& other, const Rest& rest) {
        const bool is_equal = other.priority == prompt.priority;
        switch (policy_) {
            case SchedulingPolicy::kFcfs:
                return true;
            case SchedulingPolicy::kPriority:
                return other.priority <= prompt.priority ||
                       (other.has_begun && static_cast<double>(other.priority) < end);
            case SchedulingPolicy::kSpf:
                return other.priority < prompt.priority || (is_equal && rest.num_left <= prompt.num_left);
            default:
                return other.priority < prompt.priority || (is_equal && other.deadline_s <= prompt.deadline_s);
        }
    };
    for (size_t i = 0; i < rests.size(); ++i) rests[i].before = is_ahead(entries_[i].prompt, rests[i]);
}

// Prompts of a lower priority number and, among equal ones, those that are not longer go first. Meanwhile as much of
// the longer ones is computed, the oldest first.
void PromptQueue::order_by_turns(const QueuedPrompt& prompt, std::vector<Rest>& rests) const {
    const int own_lane = lane_of(prompt.num_left);
    double turns_s = 0;
    std::vector<Rest*> longer;
    for (size_t i = 0; i < rests.size(); ++i) {
        const int64_t priority = entries_[i].prompt.priority;
        const bool is_longer = lane_of(rests[i].num_left) > own_lane;
        rests[i].before = priority < prompt.priority || (priority == prompt.priority && !is_longer);
        if (priority == prompt.priority && is_longer) longer.push_back(&rests[i]);
        if (priority == prompt.priority && !is_longer) turns_s += rests[i].service_s;
    }
    for (Rest* rest : longer) {
        const double taken_s = std::min(turns_s, rest->service_s);
        rest->before = rest->service_s > 0 ? taken_s / rest->service_s : 1.0;
        turns_s -= taken_s;
    }
}

// Prompts of a lower priority number go first; among equal ones, a simulated race decides.
void PromptQueue::order_by_ratio(const QueuedPrompt& prompt, const PromptPace& pace, std::vector<Rest>& rests) const {
    double begins_s = 0;
    std::vector<Racer> racers;
    std::vector<size_t> indices;  // in `rests`
    racers.reserve(rests.size());
    indices.reserve(rests.size());
    for (size_t i = 0; i < rests.size(); ++i) {
        const QueuedPrompt& other = entries_[i].prompt;
        if (other.priority < prompt.priority) {
            rests[i].before = 1;
            begins_s += rests[i].service_s;
        } else if (other.priority == prompt.priority) {
            const double waited_s = prompt.arrived_s - other.arrived_s;
            racers.push_back({rests[i].num_left, rests[i].service_s, waited_s, other.has_begun});
            indices.push_back(i);
        }
    }
    race(racers, {prompt.num_left, pace.service_s(prompt), 0}, begins_s, pace.step_s());
    for (size_t i = 0; i < racers.size(); ++i) {
        Rest& rest = rests[indices[i]];
        rest.before = rest.service_s > 0 ? 1 - racers[i].service_s / rest.service_s : 1;
    }
}

// Returns, for each prompt ahead, the part that is computed before the new one. While the new prompt's flow computes
// its own prompts up to this one, which takes `own_s`, each other flow gets as much time in proportion to its weight.
std::vector<double> PromptQueue::shares(const QueuedPrompt& prompt, double own_s,
                                        const std::vector<Rest>& rests) const {
    struct Flow {
        int64_t flow;
        double service_s, weight;
    };
    std::vector<Flow> flows;
    std::vector<double> shares(rests.size(), 1.0);
    if (std::ranges::all_of(entries_, [&](const Entry& e) { return e.prompt.flow == prompt.flow; })) return shares;
    const auto find = [&](int64_t flow) { return std::ranges::find(flows, flow, &Flow::flow); };
    const auto is_shared = [&](size_t i) {
        const QueuedPrompt& other = entries_[i].prompt;
        return rests[i].before > 0 && other.flow != prompt.flow && other.priority == prompt.priority;
    };
    for (size_t i = 0; i < rests.size(); ++i) {
        const QueuedPrompt& other = entries_[i].prompt;
        if (rests[i].before > 0 && other.flow == prompt.flow) own_s += rests[i].service_s;
        if (!is_shared(i)) continue;
        auto flow = find(other.flow);
        if (flow == flows.end()) flow = flows.insert(flow, {other.flow, 0.0, 0.0});
        flow->service_s += rests[i].service_s;
        flow->weight = std::max(flow->weight, other.flow_weight);
    }
    if (flows.empty()) return shares;
    for (size_t i = 0; i < rests.size(); ++i) {
        if (!is_shared(i)) continue;
        const Flow& flow = *find(entries_[i].prompt.flow);
        const double most_s = own_s * flow.weight / prompt.flow_weight;
        shares[i] = std::min(1.0, most_s / std::max(flow.service_s, 1e-9));
    }
    return shares;
}

double PromptQueue::overtaking_part(const QueuedPrompt& prompt, const PromptPace& pace, double wait_s) const {
    if (policy_ == SchedulingPolicy::kFcfs || latest_.size() < 2) return 0;
    const int own_lane = lane_of(prompt.num_left);
    const auto part_of = [&](const QueuedPrompt& other) -> double {
        if (other.priority < prompt.priority) return 1;
        if (other.priority > prompt.priority || other.flow != prompt.flow) return 0;
        switch (policy_) {
            case SchedulingPolicy::kHrrn:  // the part of the prompt's wait during which it can be overtaken
                return lane_of(other.num_left) < own_lane ? 1 - other.num_left / prompt.num_left : 0;
            case SchedulingPolicy::kSpf:
                return other.num_left < prompt.num_left;
            case SchedulingPolicy::kTurns:
                return lane_of(other.num_left) < own_lane;
            case SchedulingPolicy::kDeadline: {
                const double later_s = (prompt.deadline_s - prompt.arrived_s) - (other.deadline_s - other.arrived_s);
                return std::clamp(later_s / std::max(wait_s, 1e-9), 0.0, 1.0);
            }
            default:
                return 0;
        }
    };
    double overtaking_s = 0, first_s = kInfinity;
    for (const QueuedPrompt& other : latest_) {
        if (const double part = part_of(other); part > 0) overtaking_s += part * pace.service_s(other);
        first_s = std::min(first_s, other.arrived_s);
    }
    const double span_s = std::max({prompt.arrived_s - first_s, wait_s, 1e-9});
    const double most = policy_ == SchedulingPolicy::kTurns ? kPartOfTurns : kMaxOvertakingPart;
    return std::min(overtaking_s / span_s, most);
}

}  // namespace swiftkv
