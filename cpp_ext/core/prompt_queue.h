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
    double num_left;  // tokens that are not in the cache, as far as the engine knows
    double arrived_s;
    int64_t priority;
    double deadline_s;
    int64_t flow;
    double flow_weight;
    double num_coming = 0;  // the part of `num_left` that waiting prompts will have put into the cache by then
    bool has_begun = false;
    double done_s = 0;  // the time for which it has been computed

    // The number of tokens that must be computed.
    double num_computed() const { return num_left - num_coming; }
    // The number of pairs of a token that must be computed and a token that it attends to.
    double pairs() const { return num_computed() * (num_tokens - 0.5 * num_computed()); }
};

// The speed at which prompts are computed beside the answers that go on.
struct PromptPace {
    double token_s;
    double pair_s;
    double overhead_s;  // the time of a step beside its work on prompts
    double spare_s;     // the time of a step that is left for prompts
    double budget;      // the most prompt tokens in a step

    // The time of a full step.
    double step_s() const;
    double work_s(const QueuedPrompt& prompt) const {
        return token_s * prompt.num_computed() + pair_s * prompt.pairs();
    }
    // The number of steps, which may be a fraction, that a prompt fills if its work takes `work_s`.
    double steps(const QueuedPrompt& prompt, double work_s) const;
    // The time of a prompt that shares its steps with others.
    double service_s(const QueuedPrompt& prompt) const {
        const double work_s = this->work_s(prompt);
        return work_s + steps(prompt, work_s) * overhead_s;
    }
    // The time of a prompt that nothing interrupts and that fills whole steps.
    double computing_s(const QueuedPrompt& prompt) const;
    // The number of tokens computed of a prompt that has shared its steps with others for `done_s`. It grows ever more
    // slowly, because later tokens attend to more.
    double num_done(const QueuedPrompt& prompt, double done_s) const;
};

// The work on prompts before and after one that arrives, in steps and in seconds without the steps' overhead.
struct WorkAhead {
    double steps = 0, work_s = 0;
    double steps_behind = 0, work_behind_s = 0;
    double num_waiting = 0, tokens_waiting = 0;  // of the prompts ahead that have not begun
    int num_begun = 0;                           // prompts that have begun and need not give way to it
};

// The prompts of one engine. All times are seconds of one clock.
class PromptQueue {
  public:
    explicit PromptQueue(SchedulingPolicy policy) : policy_(policy) {}

    // Throws std::invalid_argument if the id is already in the queue.
    void add(RequestId id, const QueuedPrompt& prompt);
    // Notes that the engine has begun to compute a prompt, and how much of it is left.
    void begin(RequestId id, double num_left);
    // Notes how much of a waiting prompt is left after another prompt with the same beginning has begun.
    void expect(RequestId id, double num_left, double num_coming);
    void remove(RequestId id);
    std::optional<QueuedPrompt> find(RequestId id) const;
    bool empty() const { return entries_.empty(); }
    bool has_begun() const { return !begun_.empty(); }
    // Credits the time since the last call to the prompts that the engine computes, one after the other: the first gets
    // as much as it still needs, the next one the rest. Without a pace, no prompt gets any.
    void advance(double now_s, const PromptPace* pace);

    // Returns the work before and after a prompt that arrives now.
    WorkAhead ahead_of(const QueuedPrompt& prompt, const PromptPace& pace) const;
    // The part, from 0 to 0.9, of a wait of `wait_s` that later prompts will take if they keep coming as they did.
    double overtaking_part(const QueuedPrompt& prompt, const PromptPace& pace, double wait_s) const;
    // The first priority beyond the class of `priority`: running requests from there on give way to the prompt.
    double end_of_class(int64_t priority) const;

  private:
    struct Entry {
        RequestId id;
        QueuedPrompt prompt;
    };
    // The rest of an entry, and the part of it, from 0 to 1, that is computed before a prompt that arrives.
    struct Rest {
        double num_left, steps, work_s, service_s, before;
    };

    size_t index_of(RequestId id) const;  // into `entries_`; where it would be inserted if it is not there
    bool contains(RequestId id) const;
    bool interrupts() const;
    QueuedPrompt* head(double now_s, const PromptPace& pace);
    Rest rest_of(const QueuedPrompt& prompt, const PromptPace& pace) const;
    std::vector<Rest> rests(const PromptPace& pace) const;
    void order(const QueuedPrompt& prompt, const PromptPace& pace, std::vector<Rest>& rests) const;
    void order_by_turns(const QueuedPrompt& prompt, std::vector<Rest>& rests) const;
    void order_by_ratio(const QueuedPrompt& prompt, const PromptPace& pace, std::vector<Rest>& rests) const;
    std::vector<double> shares(const QueuedPrompt& prompt, double own_s, const std::vector<Rest>& rests) const;

    const SchedulingPolicy policy_;
    std::vector<Entry> entries_;        // sorted by id
    std::vector<RequestId> begun_;      // in the order in which they began
    std::vector<QueuedPrompt> latest_;  // the prompts that came last, a ring
    size_t num_added_ = 0;
    double advanced_s_ = 0;
};

}  // namespace swiftkv
