// The policy: which request goes first, which one makes room for others, and how much of a prompt one step takes.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "kv_cache.h"
#include "request.h"
#include "scheduler_limits.h"
#include "step_time.h"

namespace swiftkv {

// Decides which request is next, which must leave, and how much fits. It changes nothing: the step builder acts on it.
class Policy {
  public:
    // The order of running requests: lower priority first, then earlier arrival. The last one makes room for others.
    struct Order {
        bool operator()(const Request* a, const Request* b) const;
    };
    using Running = std::span<Request* const>;  // in order

    Policy(const KvCache& cache, const SchedulerLimits& limits, const StepTime& step_time)
        : cache_(cache), limits_(limits), step_time_(step_time) {}

    // ---- which request is next ----
    // Whether a cached block that the waiting request could use is still on its way: it is loading, or a running
    // request is about to compute it.
    bool is_prefix_coming(const Request& request, Running running) const;
    // Whether the first waiting request that finds no room holds up the requests after it. The answer changes with
    // time: it holds them up for 1 s, lets them by for 2 s, holds them up for 4 s, and so on. So it does not wait for
    // ever, and the others always get a good part of the time.
    bool holds_up_others(const Request& request, double now_s) const;
    // The number of waiting requests that one step looks at, and the number that may find no room, before it gives up.
    int max_looks() const { return 256; }
    int max_refusals() const { return 16; }
    // The number of keys of waiting requests that a step looks up in the prefix cache, in a few milliseconds, before it
    // looks at no further one.
    int64_t max_keys() const { return 1 << 17; }
    // Whether there would be room for the request if it were alone.
    bool could_hold(const Request& request) const;
    // Whether the request needs a step of its own: its prompt is not split, and is longer than the budget of a step.
    bool is_oversized(const Request& request) const;
    // Whether the waiting request may begin beside the prompts that are computed in part. Prompts of lower classes do
    // not count.
    bool may_begin(const Request& request, Running running) const;

    // ---- which request must leave ----
    // Returns the running request that is preempted when others need room.
    Request& victim(Running running) const;
    // Whether requests of this priority have a higher class than some running request.
    bool outranks_some(int64_t priority, Running running) const;
    // Returns the running requests that may be displaced by a waiting one of a higher class, in this order: the lowest
    // class first; within a class, requests without a token first, because their clients notice least; then the latest
    // begun. Batch work may always be displaced. Any other request that was displaced before must first get another
    // token: so each makes progress, however many requests of a higher class come. Requests whose `begun` is
    // `num_begun` or more have only just begun, and stay.
    std::vector<Request*> displaceable(const Request& waiting, Running running, int64_t num_begun) const;

    // ---- how much fits ----
    // The most tokens of one step, an oversized prompt aside.
    int token_budget() const { return limits_.max_num_batched_tokens; }
    // Whether several steps may compute one prompt.
    bool splits_prompts() const { return limits_.enable_chunked_prefill; }
    // The most seconds that a step with these decodes may take. Prompts get at least as much time as the decodes.
    double time_limit_s(const StepWork& decodes) const;
    // Whether a step of `limit_s` with `work` has time for a block of a prompt; always true for the first prompt.
    bool has_time(const StepWork& work, double limit_s) const;
    // The number of a prompt's tokens that a step with `work` computes when it has `budget` tokens left and may take
    // `limit_s`. The time limit always leaves room for one block. first_chunk() takes a prompt that is not split whole,
    // even if it is too long.
    int first_chunk(const Request& request, int budget, const StepWork& work, double limit_s) const;
    int next_chunk(const Request& request, int budget, const StepWork& work, double limit_s) const;
    // The speed at which prompts are expected to be computed beside the running requests; nullopt while step times are
    // not known.
    std::optional<double> prefill_tokens_per_s(Running running) const;
    // The seconds that tokens `begin` to `end` of a prompt are expected to take beside the running requests; nullopt
    // while step times are not known.
    std::optional<double> prefill_s(int begin, int end, Running running) const;
    // The number of guesses to compute beside the running requests, so that answers get the most tokens per second.
    // `chances`: how often each guess is expected to yield a token, in falling order. Returns all while step times are
    // not known.
    int num_worthy_guesses(Running running, std::span<const double> chances) const;
    // The seconds that guesses take of a step; 0 while step times are not known.
    double guesses_s(int num_guesses) const { return num_guesses * step_time_.row_s(); }
    // The number of draft tokens, at most `most`, that a request computes after its last token; 0 unless its last token
    // is known and in the step.
    int draft_length(const Request& request, int most) const;
    // The most tokens that one step samples, drafts included: there is memory for the logits of so many rows.
    int max_samples() const { return limits_.max_num_seqs; }
    // The part of a chunk of `wanted` tokens for which the sliding-window groups have room, beside `spare` blocks and
    // the blocks of the other groups up to `prompt_end`. A chunk shrinks before a request waits.
    int fitting_chunk(const Request& request, int wanted, int prompt_end, Spare spare) const;
    // The number of blocks that stay available in every group when a request is admitted: one for each running request,
    // so that the admitted one is not preempted soon.
    int spare_blocks(Running running) const { return static_cast<int>(running.size()); }
    // ---- what is kept ----
    // Calls visit(length, worth) for the boundaries to keep between the first `from` and `to` blocks of a request: the
    // end of its prompt, the point where it left another request's path, and regular ones.
    template <class Visit>
    void for_each_boundary(const Request& request, int from, int to, Visit&& visit) const;

    // The most blocks of a decoding request that one step moves into the local pool, so that the step stays short.
    int max_promoted_blocks() const { return 32; }

  private:
    bool is_long(int num_left) const;
    int timely_chunk(const Request& request, const StepWork& work, double limit_s) const;
    static StepWork decodes_of(Running running);
    // The number of a prompt's tokens, after its first `begin`, that are expected to fit into a step with `decodes`.
    int chunk_beside(const StepWork& decodes, int begin) const;

    const KvCache& cache_;
    const SchedulerLimits& limits_;
    const StepTime& step_time_;
};

template <class Visit>
void Policy::for_each_boundary(const Request& r, int from, int to, Visit&& visit) const {
    if (!cache_.has_windows()) return;
    const auto is_within = [&](int length) { return length > from && length <= to; };
    if (limits_.retention_interval) {
        const int64_t interval = *limits_.retention_interval, size = limits_.block_size;
        for (int64_t at = (from * size / interval + 1) * interval; at / size <= to; at += interval)
            if (is_within(static_cast<int>(at / size))) visit(static_cast<int>(at / size), Worth::kInterval);
    }
    if (const int prompt_end = r.prompt_len / limits_.block_size; is_within(prompt_end))
        visit(prompt_end, Worth::kKept);
    if (is_within(r.num_shared_blocks)) visit(r.num_shared_blocks, Worth::kKept);
}

}  // namespace swiftkv
