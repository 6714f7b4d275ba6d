// Iteration-level continuous batching: decides, step by step, which tokens of which requests are computed.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "admission_order.h"
#include "demand.h"
#include "fair_share.h"
#include "kv_cache.h"
#include "pins.h"
#include "plan.h"
#include "plan_writer.h"
#include "policy.h"
#include "refusal.h"
#include "request.h"
#include "roster.h"
#include "scheduler_limits.h"
#include "step_builder.h"
#include "step_time.h"
#include "types.h"

namespace swiftkv {

// Thread-safe. One thread steps: every schedule() that returns a plan is followed by its commit(), or abandon(). In
// between requests may come and go, and so may extents.
//
// A step may be planned while the one before it is in progress, with tokens that are not known yet (xLLM, section 4.1).
// Such a plan assumes that no request ends in that step: if one does, it was computed in vain, and its row does not
// count.
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
    // Guesses the tokens that follow those of a request, in place of any guess before. The next step that decodes it
    // computes as many of them as nobody else wants room for, and samples behind each: so it yields the token that
    // would come without a draft, and another one for each guess that is right. A draft is forgotten when its request
    // gets a token: one that comes while a step in progress samples for its request is in vain. One for a request that
    // is not known is ignored. Throws std::invalid_argument for a negative token; that no token exceeds the vocabulary
    // is the caller's business.
    void set_draft(RequestId id, std::span<const TokenId> tokens);
    bool has_work() const;

    // nullptr if nothing can run, or nothing before the step in progress is committed; of those there are at most two.
    // `now_s`: any clock that does not go back.
    std::unique_ptr<StepPlan> schedule(double now_s);
    // Ends the oldest step in progress. `sampled`: one token per row of its plan's logits_rows; below 0: none.
    // `duration_s`: how long the device was busy with it; 0 if that is not known.
    StepResult commit(std::span<const TokenId> sampled, double duration_s);
    // Gives up the only step in progress, whose copies failed. What it computed does not count.
    void abandon();
    // Returns requests that have waited longer than `max_wait_s` for room that they would not have even if alone.
    std::vector<RequestId> starved(double now_s, double max_wait_s) const;

    // ---- of a lender ----
    // Takes up to `max_extents` extents out of the pool and returns them; cached blocks in them are forgotten.
    std::vector<int> lend(int lend_link, int max_extents);
    void take_back(int lend_link, std::span<const int32_t> extents);
    std::vector<GroupDemand> take_demand();
    bool is_short() const;  // whether some group's demand has a shortfall
    // ---- of a borrower ----
    void borrow(int borrow_link, std::span<const int32_t> extents);
    // Asks extents back: their content moves or is forgotten in the next step; then take_returned() names them.
    void recall(int borrow_link, std::span<const int32_t> extents);
    std::vector<int> take_returned(int borrow_link);
    // Forgets the lender, which is gone, and its extents. Requests that needed them are computed again.
    void lose(int borrow_link);

    // ---- of places further down ----
    // These do what they do in KvCache; requests that want a prefix which is loading wait. Nothing begins to load while
    // a running request waits for the room of what is loading.
    std::vector<BlockId> begin_loading(const BlockKey& key);
    void end_loading(std::span<const BlockId> blocks, bool is_loaded);

    // ---- storage ----
    void set_write_policy(WritePolicy policy);
    // Returns blocks to store, as KvCache::take_offers does. While a step in progress copies blocks, there are none.
    // Their bytes stay where they are until end_copying(): no extent is lent or returned meanwhile, and no step is
    // planned.
    std::vector<StoredBlock> take_offers(int max_blocks);
    void end_copying();
    // Offers what is here of a prefix now, whatever the write policy waits for.
    void offer_prefix(std::span<const BlockKey> keys);
    int num_offers() const;
    int64_t num_dropped_offers() const;
    // The waiting request is not admitted before it is let go. Unknown ids are ignored, here and below.
    void hold(RequestId id);
    void let_go(RequestId id);
    // The keys of the blocks that a waiting request could find, and which of them are here: [keys][groups].
    struct Lookup {
        std::vector<BlockKey> keys;
        std::vector<uint8_t> is_resident;
        int num_usable;  // of the keys, now
    };
    Lookup look_up(RequestId id) const;
    // The seconds that computing tokens `begin` to `end` of a prompt is expected to take; nothing before it is known.
    std::optional<double> prefill_s(int begin, int end) const;
    // Does what KvCache::evicted_age_s does.
    std::optional<double> evicted_age_s(const BlockKey& key) const;
    // How many of its keys the request could use if storage gave these blocks, [keys][groups], beside those here: no
    // more than `max_blocks`, and than the local pool can hold. Throws std::invalid_argument if `is_stored` has another
    // size than look_up() said.
    int loadable(RequestId id, std::span<const uint8_t> is_stored, int max_blocks) const;
    // Takes blocks for those of a waiting request's blocks `first` to `num_blocks` that are not here, and leaves room
    // for those before. Returns none if there is no room but that of blocks which storage has brought for requests that
    // have not begun, a running request waits for the room of what is loading, or a step in progress copies blocks.
    std::vector<LoadingBlock> begin_load(RequestId id, int num_blocks, int first);
    // Whether the front of a prompt can be computed while its back is loading: not where a prompt is computed as a
    // whole, nor without full attention, for of windows only a tail is loaded.
    bool can_meet() const { return limits_.enable_chunked_prefill && cache_.has_full_attention(); }
    // Lets the waiting request begin: it computes its front while storage loads its back, the blocks before
    // `num_blocks`, the last one first. It skips the rest of the back as soon as all of that is here. Throws
    // std::invalid_argument if the request has fewer keys.
    void meet(RequestId id, int num_blocks);
    // How many of a request's blocks are computed, or are being computed by steps in progress.
    int num_planned_blocks(RequestId id) const;
    // These throw std::invalid_argument unless the blocks are loading.
    void forget_loading(std::span<const LoadedBlock> blocks);
    void end_load(std::span<const LoadedBlock> blocks, bool is_loaded);

    // ---- pins ----
    // Keeps the longest prefix of `keys` that can be used and lies in the local pool, as Pins does. Throws
    // std::invalid_argument if the pin is already known.
    PinOutcome pin(PinId id, std::span<const BlockKey> keys, double max_share);
    // Returns whether there was such a pin.
    bool unpin(PinId id);
    // Returns pins that were given up since the last call: for a request that could not run otherwise, or because their
    // bytes were lost.
    std::vector<PinId> take_lost_pins();

    // ---- events ----
    // Keeps up to `max_events` of what the prefix index learns and forgets, for take_kv_events().
    void enable_kv_events(int max_events);
    KvEvents take_kv_events();
    // All that the events of an engine's whole life add up to.
    std::vector<ResidentBlock> resident_blocks() const;

    SchedulerStats stats() const;
    StepTime step_time() const;  // as fitted to the steps so far
    // Predicts steps as another scheduler did. Throws std::invalid_argument as StepTime::remembered does.
    void remember_step_time(const StepTime::Terms& coefficients);
    void check_invariants() const;
    void reset_prefix_cache();

  private:
    struct Step {
        std::vector<StepRow> rows;
        bool has_copies;
        StepWork work;
    };

    // Functions that change more than one thing are noexcept: an exception half-way, if only for want of memory, would
    // leave books that nobody can trust, so it ends the process instead.
    void abort_one(RequestId id) noexcept;
    std::unique_ptr<StepPlan> plan_step(double now_s) noexcept;
    StepResult commit_step(std::span<const TokenId> sampled) noexcept;
    void abandon_step() noexcept;
    void drop_lost() noexcept;

    bool can_plan_ahead() const;
    void fill(StepBuilder& step);
    void clear_the_way(StepBuilder& step);
    std::unique_ptr<StepPlan> open(StepBuilder& step);
    void settle_lending();
    void note_demand() { demand_.note(roster_.num_running()); }

    void commit_row(const StepRow& row, std::span<const TokenId> sampled, StepResult& result);
    void commit_computed(const StepRow& row, int num_rejected);
    void end(Request& request);
    void drop_steps(Request& request);
    void leave_steps(const Request& request, bool is_dropped);
    bool reads_lost(const StepRow& row) const;
    std::vector<std::span<const BlockKey>> prefixes_brought_before(const Request& request) const;
    void check_is_open(const char* what) const;
    bool is_step_copying() const { return !open_.empty() && open_.back().has_copies; }
    void check_steps(const Request& running) const;

    mutable std::mutex mutex_;  // held by every public function
    SchedulerLimits limits_;
    KvCache cache_;
    Demand demand_;
    const std::unique_ptr<const AdmissionOrder> order_;
    FairShare shares_;
    Roster roster_;
    Pins pins_;
    StepTime step_time_;
    Policy policy_;
    Refusal refusal_;
    PlanWriter writer_;
    std::deque<Step> open_;          // the steps in progress, the oldest first
    bool must_commit_ = false;       // nothing is planned before a commit
    std::vector<Meeting> meetings_;  // those that no plan has named yet
    bool is_copying_ = false;        // the blocks that take_offers() named last are being copied

    int64_t prefix_matches_total_ = 0;
    int64_t prefix_query_tokens_total_ = 0;
    int64_t prefix_hit_tokens_total_ = 0;
    int64_t borrowed_hit_tokens_total_ = 0;
    int64_t window_missed_tokens_total_ = 0;
    double step_s_total_ = 0;
};

}  // namespace swiftkv
