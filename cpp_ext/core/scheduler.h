// Iteration-level continuous batching: decides, step by step, which tokens of which requests are computed.
#pragma once

#include <memory>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "kv_cache.h"
#include "plan.h"
#include "types.h"

namespace swiftkv {

struct SchedulerLimits {
    int block_size;
    int max_num_seqs;
    int max_num_batched_tokens;
    int max_model_len;
    bool enable_prefix_caching;
    bool enable_chunked_prefill;
};

struct NewRequest {
    RequestId id;
    std::span<const TokenId> prompt;
    int max_tokens;
    int min_tokens;
    std::span<const TokenId> stop_token_ids;
    std::span<const uint8_t> cache_namespace;
    bool skip_prefix_match;
    int priority;
};

// Not thread-safe: one thread owns it. Every schedule() that returns a plan is followed by its commit(); requests may
// be added and aborted in between.
class Scheduler {
  public:
    // Throws std::invalid_argument, also if a pool is too small for one sequence of max_model_len tokens.
    Scheduler(std::vector<GroupSpec> groups, SchedulerLimits limits);
    ~Scheduler();
    Scheduler(const Scheduler&) = delete;
    Scheduler& operator=(const Scheduler&) = delete;

    // Throws std::invalid_argument.
    void add_request(const NewRequest& request);
    void abort(std::span<const RequestId> ids);
    bool has_work() const { return !requests_.empty() || is_step_open_; }

    // nullptr if nothing can run.
    std::unique_ptr<StepPlan> schedule();
    // `sampled`: one token per row of the plan's logits_rows.
    StepResult commit(std::span<const TokenId> sampled);

    SchedulerStats stats() const;
    void check_invariants() const;
    void reset_prefix_cache() { cache_.reset(); }

  private:
    struct Request;
    struct Order {
        bool operator()(const Request* a, const Request* b) const;
    };
    struct StepRow {
        Request* request;  // null: aborted since
        RequestId id;
        int num_tokens;
        bool samples;
    };

    void validate(const NewRequest& request) const;

    void admit_oversized_prompt();
    void schedule_decodes();
    void schedule_prefills();
    void admit_waiting();
    bool admit(Request& request, int token_budget);
    bool is_being_computed(const Request& request) const;
    bool make_room(Request& request, int num_tokens);
    void add_to_step(Request& request, int num_tokens);
    void preempt(Request& request);
    void stop_running(Request& request);
    int max_match_blocks(const Request& request) const;

    std::unique_ptr<StepPlan> write_plan();
    void write_row(StepPlan& plan, const StepRow& row) const;

    void commit_computed(const StepRow& row);
    FinishReason append_token(Request& request, TokenId token);
    FinishReason finish_reason(const Request& request) const;

    SchedulerLimits limits_;
    KvCache cache_;
    std::unordered_map<RequestId, std::unique_ptr<Request>> requests_;
    std::set<Request*, Order> waiting_;
    std::vector<Request*> running_;  // in Order
    std::vector<int> free_slots_;    // a heap: lowest first
    uint64_t num_arrived_ = 0;

    bool is_step_open_ = false;
    int budget_left_ = 0;  // tokens
    std::vector<StepRow> step_;
    std::vector<Request*> admitted_;  // for the first time, in this step
    std::vector<RequestId> preempted_;

    int64_t num_preemptions_total_ = 0;
    int64_t prefix_query_tokens_total_ = 0;
    int64_t prefix_hit_tokens_total_ = 0;
};

}  // namespace swiftkv
