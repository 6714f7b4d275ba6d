// The prompts of one engine that have no token yet, as its gateway sees them, and the work ahead of one that arrives.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "scheduler_limits.h"
#include "types.h"

namespace swiftkv {

struct QueuedPrompt {
    double num_tokens;
    double num_left;  // of them are not in the cache, as far as the engine knows
    double arrived_s;
    int64_t priority;
    double deadline_s;
    int64_t flow;
    double flow_weight;
    double num_coming = 0;  // of `num_left`, what prompts that wait will have left in the cache
    bool has_begun = false;
    double done_s = 0;  // the time for which it has been computed

    // The tokens that are to be computed.
    double num_computed() const { return num_left - num_coming; }
    // Pairs of a token that is to be computed and one that it looks back on.
    double pairs() const { return num_computed() * (num_tokens - 0.5 * num_computed()); }
};

// The speed at which prompts are computed beside the answers that go on.
struct PromptPace {
    double token_s;
    double pair_s;
    double overhead_s;  // time of a step beside its work on prompts
    double spare_s;     // time of a step that is left for prompts
    double budget;      // tokens of prompts in a step

    // The time of a full step.
    double step_s() const;
    double work_s(const QueuedPrompt& prompt) const {
        return token_s * prompt.num_computed() + pair_s * prompt.pairs();
    }
    // How many steps a prompt fills whose work takes `work_s`, parts of steps included.
    double steps(const QueuedPrompt& prompt, double work_s) const;
    // How long a prompt takes that shares its steps with others.
    double service_s(const QueuedPrompt& prompt) const {
        const double work_s = this->work_s(prompt);
        return work_s + steps(prompt, work_s) * overhead_s;
    }
    // How long a prompt takes that nothing interrupts.
    double computing_s(const QueuedPrompt& prompt) const;
    // How many tokens are computed of a prompt that has shared its steps with others for so long: ever fewer in the
    // same time, since they look back on more.
    double num_done(const QueuedPrompt& prompt, double done_s) const;
};

// The work on the prompts ahead of one that arrives and behind it, in steps and in seconds beside their overhead.
struct WorkAhead {
    double steps = 0, work_s = 0;
    double steps_behind = 0, work_behind_s = 0;
    double num_waiting = 0, tokens_waiting = 0;  // of those ahead that have not begun
    int num_begun = 0;                           // prompts that need not give way to it
};

// Times are of one clock, in seconds.
class PromptQueue {
  public:
    explicit PromptQueue(SchedulingPolicy policy) : policy_(policy) {}

    // Throws std::invalid_argument if the id is there.
    void add(RequestId id, const QueuedPrompt& prompt);
    // Notes that the engine has begun with a prompt, and how much of it is left.
    void begin(RequestId id, double num_left);
    // Notes how much is left of a prompt that waits, once another one has begun that begins like it.
    void expect(RequestId id, double num_left, double num_coming);
    void remove(RequestId id);
    std::optional<QueuedPrompt> find(RequestId id) const;
    bool empty() const { return entries_.empty(); }
    bool has_begun() const { return !begun_.empty(); }
    // Credits the time since the last call to the prompts that the engine computes, one after the other: who goes first
    // gets what is left of its own, and the next one the rest. Without a pace nobody gets any.
    void advance(double now_s, const PromptPace* pace);

    // What is ahead of a prompt that arrives now.
    WorkAhead ahead_of(const QueuedPrompt& prompt, const PromptPace& pace) const;
    // The part of a wait of `wait_s` that later prompts will take, if as many come as of late.
    double overtaking_part(const QueuedPrompt& prompt, const PromptPace& pace, double wait_s) const;
    // The priority from which on running requests give way to a prompt: those of lower classes do.
    double end_of_class(int64_t priority) const;

  private:
    struct Entry {
        RequestId id;
        QueuedPrompt prompt;
    };
    // The rest of an entry, and the part of it that is computed before a prompt that arrives.
    struct Rest {
        double num_left, steps, work_s, service_s, before;
    };

    size_t index_of(RequestId id) const;  // the place in `entries_`, or the one where it would be
    bool contains(RequestId id) const;
    bool interrupts() const;
    QueuedPrompt* head(double now_s, const PromptPace& pace);
    Rest rest_of(const QueuedPrompt& prompt, const PromptPace& pace) const;
    std::vector<Rest> rests(const PromptPace& pace) const;
    void order(const QueuedPrompt& prompt, const PromptPace& pace, std::vector<Rest>& rests) const;
    void order_by_ratio(const QueuedPrompt& prompt, const PromptPace& pace, std::vector<Rest>& rests) const;
    std::vector<double> shares(const QueuedPrompt& prompt, double own_s, const std::vector<Rest>& rests) const;

    const SchedulingPolicy policy_;
    std::vector<Entry> entries_;        // by id
    std::vector<RequestId> begun_;      // in the order in which they began
    std::vector<QueuedPrompt> latest_;  // those that came last, a ring
    size_t num_added_ = 0;
    double advanced_s_ = 0;
};

}  // namespace swiftkv
