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
#include "drafting.h"
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

// Thread-safe. One thread makes the steps: every schedule() that returns a plan is followed by a commit() or abandon().
// Between these calls, requests and extents may come and go.
//
// A step may be planned while the one before it is in progress, with tokens that are not known yet (xLLM, section 4.1).
// Such a plan assumes that no request ends in the step in progress. If one does, its row in the next step does not
// count.
class Scheduler {
  public:
    // Throws std::invalid_argument as check_setup() does.
    Scheduler(std::vector<GroupSpec> groups, SchedulerLimits limits, std::vector<Link> lend_links = {},
              std::vector<Link> borrow_links = {});
    Scheduler(const Scheduler&) = delete;
    Scheduler& operator=(const Scheduler&) = delete;

    // Throws std::invalid_argument if the request is known already, or as check_request() does.
    void add_request(const NewRequest& request);
    void abort(std::span<const RequestId> ids);
    // Sets the draft of a request: guesses at its next tokens, in place of earlier ones. The next step that decodes the
    // request computes as many of them as fit into room that no other request wants, and samples after each. So it
    // yields the token that would come without a draft, and one more for each guess that is right. The draft is
    // forgotten when the request gets a token, so a draft set while a step in progress samples for the request has no
    // effect. Unknown requests are ignored. Throws std::invalid_argument for a negative token. The caller must check
    // that tokens are below the vocabulary size.
    void set_draft(RequestId id, std::span<const TokenId> tokens);
    bool has_work() const;

    // Returns the plan of a step; nullptr if nothing can run now, or not before the step in progress is committed. At
    // most two steps are in progress. `now_s`: a clock that does not go back.
    std::unique_ptr<StepPlan> schedule(double now_s);
    // Ends the oldest step in progress. `sampled`: one token per row of its plan's logits_rows; below 0: no token.
    // `duration_s`: the time for which it kept the device busy; 0 if that is not known.
    StepResult commit(std::span<const TokenId> sampled, double duration_s);
    // Gives up the only step in progress, whose copies failed. Its results are discarded.
    void abandon();
    // Returns the requests that have waited longer than `max_wait_s` for room that they would not have even if they
    // were alone. The wait starts anew if a call of this function finds that there is such room.
    std::vector<RequestId> starved(double now_s, double max_wait_s);

    // ---- lending ----
    // Takes up to `max_extents` extents out of the pool and returns them. Cached blocks in them are forgotten.
    std::vector<int> lend(int lend_link, int max_extents);
    void take_back(int lend_link, std::span<const int32_t> extents);
    std::vector<GroupDemand> take_demand();
    bool is_short() const;  // whether some group's demand has a shortfall
    // ---- borrowing ----
    void borrow(int borrow_link, std::span<const int32_t> extents);
    // Recalls extents: the next step moves or forgets their blocks, and then take_returned() returns the extents.
    void recall(int borrow_link, std::span<const int32_t> extents);
    std::vector<int> take_returned(int borrow_link);
    // Forgets a lender that is gone, and its extents. Requests that needed them are computed again.
    void lose(int borrow_link);

    // ---- places further down ----
    // These do what they do in KvCache. A request that wants a prefix which is loading waits for it. No load begins
    // while a running request waits for the room of loading blocks.
    std::vector<BlockId> begin_loading(const BlockKey& key);
    void end_loading(std::span<const BlockId> blocks, bool is_loaded);

    // ---- storage ----
    void set_write_policy(WritePolicy policy);
    // Returns blocks to store, as KvCache::take_offers does; none while a step in progress copies blocks. Until
    // end_copying(), their bytes stay where they are: no extent is lent or returned, and no step is planned.
    std::vector<StoredBlock> take_offers(int max_blocks);
    void end_copying();
    // Offers the blocks of a prefix that are here now, whatever the write policy waits for.
    void offer_prefix(std::span<const BlockKey> keys);
    int num_offers() const;
    int64_t num_dropped_offers() const;
    // Keeps a waiting request from being admitted until let_go(). Unknown ids are ignored, here and below.
    void hold(RequestId id);
    void let_go(RequestId id);
    // The keys that a waiting request looks up, and what the cache has of them.
    struct Lookup {
        std::vector<BlockKey> keys;
        std::vector<uint8_t> is_resident;  // [keys][groups], whether the block is here
        int num_usable;                    // the number of leading keys that can be used now
    };
    Lookup look_up(RequestId id) const;
    // The seconds that tokens `begin` to `end` of a prompt are expected to take; nullopt while step times are not
    // known.
    std::optional<double> prefill_s(int begin, int end) const;
    // Does what KvCache::evicted_age_s does.
    std::optional<double> evicted_age_s(const BlockKey& key) const;
    // The number of leading keys that the request could use if storage gave these blocks, [keys][groups], beside those
    // that are here: at most `max_blocks`, and no more than the local pool can hold. Throws std::invalid_argument
    // unless `is_stored`, and `pinned` if it has any elements, have as many as look_up() had. `pinned`: the chunks of
    // host memory that the caller has pinned for the request.
    int loadable(RequestId id, std::span<const uint8_t> is_stored, int max_blocks, PinnedChunks pinned = {}) const;
    // Takes a block for each of a waiting request's blocks `first` to `num_blocks` that is not here, and leaves room
    // for the blocks before them. Returns an empty list
    // - if a step in progress copies blocks,
    // - if a running request waits for the room of loading blocks, or
    // - if there is no room without evicting what storage has loaded for requests that have not begun.
    // A block whose chunk is pinned is taken in host memory, or the next step copies it from there. The cache then has
    // the pin: see take_unpinned().
    std::vector<LoadingBlock> begin_load(RequestId id, int num_blocks, int first, PinnedChunks pinned = {});
    std::vector<int> take_unpinned();
    // Evicts all cached blocks that lie in host memory. Returns false, with nothing changed, while a step in progress
    // copies blocks.
    bool evict_host();
    // Whether the front of a prompt can be computed while its back is loading. For that, prompts must be split, and
    // some group must have full attention: of a sliding window, only a tail is ever loaded.
    bool can_meet() const { return limits_.enable_chunked_prefill && cache_.has_full_attention(); }
    // Lets a waiting request begin: it computes its front while storage loads its back, from block `num_blocks` - 1
    // down. It skips the rest of its prompt up to there as soon as all of that is here. Throws std::invalid_argument if
    // the request has fewer keys.
    void meet(RequestId id, int num_blocks);
    // The number of a request's blocks that are computed, or are being computed by steps in progress.
    int num_planned_blocks(RequestId id) const;
    // These throw std::invalid_argument unless the blocks are loading.
    void forget_loading(std::span<const LoadedBlock> blocks);
    void end_load(std::span<const LoadedBlock> blocks, bool is_loaded);

    // ---- pins ----
    // Pins the longest usable prefix of `keys` in the local pool, as Pins::add does. Throws std::invalid_argument if
    // the pin is already known.
    PinOutcome pin(PinId id, std::span<const BlockKey> keys, double max_share);
    // Removes a pin; returns whether there was such a pin.
    bool unpin(PinId id);
    // Returns the pins that were given up since the last call: for a request that could not run otherwise, or because
    // their bytes were lost.
    std::vector<PinId> take_lost_pins();

    // ---- events ----
    // Keeps up to `max_events` changes of the prefix index for take_kv_events().
    void enable_kv_events(int max_events);
    KvEvents take_kv_events();
    // Returns the blocks that a follower of all events so far would know.
    std::vector<ResidentBlock> resident_blocks() const;

    SchedulerStats stats() const;
    StepTime step_time() const;  // as fitted to the steps so far
    // Begins with the step times of another scheduler. Throws std::invalid_argument as StepTime::remembered does.
    void remember_step_time(const StepTime::Terms& coefficients);
    void check_invariants() const;
    void reset_prefix_cache();

  private:
    struct Step {
        std::vector<StepRow> rows;
        bool has_copies;
        StepWork work;
    };

    // Functions that change more than one thing are noexcept. An exception half-way, such as std::bad_alloc, would
    // leave counts that do not add up, so it must end the process.
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
    void move_up();
    void note_demand() { demand_.note(roster_.num_running()); }

    void commit_row(const StepRow& row, std::span<const TokenId> sampled, StepResult& result);
    void note_guesses(Request& request, const StepRow& row, int num_tokens);
    struct Draft {
        Request* request;
        Match match;
        int length = 0;
    };
    void guess();
    void share_guesses(std::span<Draft> drafts) const;
    void commit_computed(const StepRow& row, int num_rejected);
    void end(Request& request);
    void drop_steps(Request& request);
    void leave_steps(const Request& request, bool is_dropped);
    bool reads_lost(const StepRow& row) const;
    void note_brought(Request& request);
    std::vector<std::span<const BlockKey>> prefixes_brought_before(const Request& request);
    void check_pinned(PinnedChunks pinned, size_t num_keys) const;
    void check_is_open(const char* what) const;
    // Blocks that a step in progress copies may be cached already, and must not be evicted before it ends.
    bool is_step_copying() const { return !open_.empty() && open_.back().has_copies; }
    void check_steps(const Request& running) const;

    mutable std::mutex mutex_;  // held by every public function
    SchedulerLimits limits_;
    KvCache cache_;
    Demand demand_;
    const std::unique_ptr<const AdmissionOrder> order_;
    FairShare shares_;
    Alternation alternation_;
    Roster roster_;
    Pins pins_;
    StepTime step_time_;
    Policy policy_;
    Refusal refusal_;
    PlanWriter writer_;
    std::deque<Step> open_;          // the steps in progress, the oldest first
    bool must_commit_ = false;       // nothing can be planned before the next commit
    std::vector<Meeting> meetings_;  // meetings that no plan has named yet
    bool is_copying_ = false;        // the blocks that take_offers() named last are being copied
    std::vector<Request*> brought_;  // the requests with a `load_end` or `back_end`, and some that had one

    int64_t prefix_matches_total_ = 0;
    int64_t prefix_query_tokens_total_ = 0;
    int64_t prefix_hit_tokens_total_ = 0;
    int64_t borrowed_hit_tokens_total_ = 0;
    int64_t window_missed_tokens_total_ = 0;
    int64_t drafts_total_ = 0, draft_tokens_total_ = 0, accepted_draft_tokens_total_ = 0;
    double step_s_total_ = 0;
};

}  // namespace swiftkv
