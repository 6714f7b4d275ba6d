// Which request goes first, which one makes room for others, and how much of a prompt one step takes.
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
    // Requests run in this order, and make room for others from its end: lower priority first, then earlier arrival.
    struct Order {
        bool operator()(const Request* a, const Request* b) const;
    };
    using Running = std::span<Request* const>;  // in order

    Policy(const KvCache& cache, const SchedulerLimits& limits, const StepTime& step_time)
        : cache_(cache), limits_(limits), step_time_(step_time) {}

    // ---- which request is next ----
    // Whether a block that the waiting request could then take from the cache is loading, or may be in storage, or a
    // running request is about to compute one.
    bool is_prefix_coming(const Request& request, Running running) const;
    // Whether nobody behind the first waiting request for which there is no room may go before it. It changes with
    // time: it holds others up for a second, lets them by for two, holds them up for four, and so on. So nobody waits
    // for ever, and at any time others have had a good part of it.
    bool holds_up_others(const Request& request, double now_s) const;
    // How many waiting requests one step looks at, and for how many of them it finds no room, before it gives up.
    int max_looks() const { return 256; }
    int max_refusals() const { return 16; }
    // Whether there would be room for the request if it were alone.
    bool could_hold(const Request& request) const;
    // Whether the request needs a step of its own: its prompt is not split, and longer than the budget of a step.
    bool is_oversized(const Request& request) const;
    // Whether the waiting request may begin beside prompts that are computed in part. Those of lower classes do not
    // count.
    bool may_begin(const Request& request, Running running) const;

    // ---- which request must leave ----
    // The running request that is preempted when others need room.
    Request& victim(Running running) const;
    // Whether requests of this priority are of a higher class than some that run.
    bool outranks_some(int64_t priority, Running running) const;
    // The running requests that give way to a waiting one of a higher class, in the order in which they leave: the
    // lowest class first; in it those without a token, whose clients notice least; of these the latest begun. Batch
    // work always gives way. Others that were displaced before do so once they have got another token: so each gets on,
    // however many of a higher class come. Those whose `begun` is `num_begun` or more have only just begun, and stay.
    std::vector<Request*> those_that_give_way(const Request& waiting, Running running, int64_t num_begun) const;

    // ---- how much fits ----
    // The most tokens of one step, an oversized prompt aside.
    int token_budget() const { return limits_.max_num_batched_tokens; }
    // Whether several steps may compute one prompt.
    bool splits_prompts() const { return limits_.enable_chunked_prefill; }
    // The seconds that a step may take whose decodes are `decodes`. Prompts get at least as much time as they.
    double time_limit_s(const StepWork& decodes) const;
    // Whether a step of `limit_s` with `work` has time for a block of a prompt; for the first one it has.
    bool has_time(const StepWork& work, double limit_s) const;
    // The tokens of a prompt that a step with `work` takes when it has `budget` left, and time until `limit_s`: at
    // least a block of it, and more than fits where it must be whole.
    int first_chunk(const Request& request, int budget, const StepWork& work, double limit_s) const;
    int next_chunk(const Request& request, int budget, const StepWork& work, double limit_s) const;
    // How fast prompts are expected to be computed beside those that run; nothing before it can be known.
    std::optional<double> prefill_tokens_per_s(Running running) const;
    // The seconds that tokens `begin` to `end` of a prompt are expected to take beside those that run; nothing as
    // above.
    std::optional<double> prefill_s(int begin, int end, Running running) const;
    // How much of its draft a request computes behind its last token, which the step has: at most `most`. A draft
    // follows what is known.
    int draft_length(const Request& request, int most) const;
    // The most tokens that one step samples, drafts included: there is memory for the logits of so many rows.
    int max_samples() const { return limits_.max_num_seqs; }
    // How much of a chunk of `wanted` tokens the sliding-window groups have room for, beside `spare` blocks and those
    // of the other groups up to `prompt_end`: a chunk shrinks before a request waits.
    int fitting_chunk(const Request& request, int wanted, int prompt_end, Spare spare) const;
    // The blocks that stay available in every group when a request is admitted: a next one for each that runs, so that
    // the admitted one is not preempted soon.
    int spare_blocks(Running running) const { return static_cast<int>(running.size()); }
    // ---- what is kept ----
    // Calls visit(length, worth) for the boundaries of a request that are kept, of those behind its first `from` blocks
    // and up to `to` blocks: its prompt's end, where it left another's path, and regular ones.
    template <class Visit>
    void for_each_boundary(const Request& request, int from, int to, Visit&& visit) const;

    // The blocks of a decoding request that one step may move into the local pool, so that the step stays short.
    int max_promoted_blocks() const { return 32; }

  private:
    bool is_long(int num_left) const;
    int timely_chunk(const Request& request, const StepWork& work, double limit_s) const;
    static StepWork decodes_of(Running running);
    // The tokens of a prompt, behind its first `begin`, that are expected to fit into a step with `decodes`.
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
