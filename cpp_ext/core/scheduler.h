// Iteration-level continuous batching: decides, step by step, which tokens of which requests are computed.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "demand.h"
#include "kv_cache.h"
#include "plan.h"
#include "plan_writer.h"
#include "request.h"
#include "scheduler_limits.h"
#include "types.h"

namespace swiftkv {

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

// Thread-safe. One thread steps: every schedule() that returns a plan is followed by its commit(), or abandon(). In
// between requests may come and go, and so may extents.
//
// A step may be planned while the one before it is in progress, with tokens that are not known yet (xLLM, section 4.1).
// That is a bet on its outcome: what has ended by then was computed in vain, and its row does not count.
class Scheduler {
  public:
    // Throws std::invalid_argument, also if one sequence of max_model_len tokens fits neither the pools nor what they
    // and all links together can hold.
    Scheduler(std::vector<GroupSpec> groups, SchedulerLimits limits, std::vector<Link> lend_links = {},
              std::vector<Link> borrow_links = {});
    Scheduler(const Scheduler&) = delete;
    Scheduler& operator=(const Scheduler&) = delete;

    // Throws std::invalid_argument.
    void add_request(const NewRequest& request);
    void abort(std::span<const RequestId> ids);
    bool has_work() const;

    // nullptr if nothing can run, or nothing before the step in progress is committed; of those there are at most two.
    // `now_s`: any clock that does not go back.
    std::unique_ptr<StepPlan> schedule(double now_s);
    // Of the oldest step in progress. `sampled`: one token per row of its plan's logits_rows; below 0: there is none.
    StepResult commit(std::span<const TokenId> sampled);
    // Instead of commit(), of the only step in progress: its copies failed. What it computed does not count.
    void abandon();
    // Requests that have waited longer than `max_wait_s` for room that is not there even if they were alone.
    std::vector<RequestId> starved(double now_s, double max_wait_s) const;

    // ---- of a lender ----
    // Takes up to `max_extents` extents out of the pool and returns them; cached blocks in them are forgotten.
    std::vector<int> lend(int lend_link, int max_extents);
    void take_back(int lend_link, std::span<const int32_t> extents);
    std::vector<GroupDemand> take_demand();
    bool is_short() const;  // whether some group's demand has a shortfall
    // ---- of a borrower ----
    void borrow(int borrow_link, std::span<const int32_t> extents);
    // What lies in the extents moves or is forgotten in the next step; then take_returned() names them.
    void recall(int borrow_link, std::span<const int32_t> extents);
    std::vector<int> take_returned(int borrow_link);
    // The lender is gone, and its extents with it. Requests that needed them are computed again.
    void lose(int borrow_link);

    SchedulerStats stats() const;
    void check_invariants() const;
    void reset_prefix_cache();

  private:
    struct Order {
        bool operator()(const Request* a, const Request* b) const;
    };
    struct Step {
        std::vector<StepRow> rows;
        bool has_copies = false;
    };

    void validate(const NewRequest& request) const;
    // What changes more than one thing is noexcept: whatever is thrown half-way, if only for want of memory, leaves
    // books that nobody can trust, and ends the process instead.
    void abort_one(RequestId id) noexcept;
    std::unique_ptr<StepPlan> plan_step(double now_s) noexcept;
    StepResult commit_step(std::span<const TokenId> sampled) noexcept;
    void abandon_step() noexcept;
    void drop_lost() noexcept;

    bool can_plan_ahead() const;
    std::unique_ptr<StepPlan> open_step();
    void settle_lending();
    void admit_oversized_prompt(double now_s);
    void schedule_decodes();
    void schedule_prefills();
    void admit_waiting(double now_s);
    bool admit(Request& request, int token_budget);
    bool is_being_computed(const Request& request) const;
    bool is_ending(const Request& request) const;
    bool make_room(Request& request, int num_tokens);
    void add_to_step(Request& request, int num_tokens);
    void preempt(Request& request);
    void stop_running(Request& request);
    void leave_steps(const Request& request, bool is_dropped);
    bool reads_lost(const StepRow& row) const;
    void enqueue(Request& request) noexcept;
    void dequeue(Request& request);
    bool could_hold(const Request& request) const;  // if it were alone
    bool is_stuck(Request& request, double now_s);
    int num_running() const { return static_cast<int>(running_.size()); }
    std::vector<BlockTable*> running_tables();
    void check_is_open(const char* what) const;
    int max_match_blocks(const Request& request) const;

    FinishReason commit_row(const StepRow& row, TokenId token);
    void commit_computed(const StepRow& row);
    void end(Request& request);
    void drop_steps(Request& request);
    FinishReason append_token(Request& request, TokenId token);
    FinishReason finish_reason(const Request& request) const;
    bool is_at_limit(const Request& request, int num_tokens) const;

    mutable std::mutex mutex_;  // held by every public function
    SchedulerLimits limits_;
    KvCache cache_;
    Demand demand_;
    PlanWriter writer_;
    std::unordered_map<RequestId, std::unique_ptr<Request>> requests_;
    std::set<Request*, Order> waiting_;
    std::vector<Request*> running_;  // in Order
    std::vector<int> free_slots_;    // a heap: lowest first
    uint64_t num_arrived_ = 0;

    std::deque<Step> open_;           // in progress, the oldest first
    bool must_commit_ = false;        // before anything else is planned
    int budget_left_ = 0;             // tokens
    std::vector<StepRow> step_;       // that is being planned
    std::vector<Request*> admitted_;  // for the first time, in this step
    std::vector<RequestId> preempted_;

    int64_t num_preemptions_total_ = 0;
    int64_t prefix_query_tokens_total_ = 0;
    int64_t prefix_hit_tokens_total_ = 0;
    int64_t borrowed_hit_tokens_total_ = 0;
};

}  // namespace swiftkv
