// Builds a step: picks the tokens that it computes, and gets blocks for them.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "admission_order.h"
#include "fair_share.h"
#include "kv_cache.h"
#include "pins.h"
#include "policy.h"
#include "refusal.h"
#include "request.h"
#include "roster.h"
#include "step_time.h"

namespace swiftkv {

// Fills one step as the policy decides, and gets blocks for its tokens. It lives as long as one schedule() call.
class StepBuilder {
  public:
    StepBuilder(KvCache& cache, Roster& roster, Pins& pins, const Policy& policy, const AdmissionOrder& order,
                FairShare& shares, Alternation& alternation, Refusal& refusal, double now_s)
        : cache_(cache),
          roster_(roster),
          pins_(pins),
          policy_(policy),
          order_(order),
          shares_(shares),
          alternation_(alternation),
          refusal_(refusal),
          now_s_(now_s),
          moment_(alternation.at(now_s)),
          num_begun_(roster.num_begun()),
          budget_left_(policy.token_budget()) {}

    // Admits a prompt that needs a step of its own; decoding pauses for it.
    void admit_oversized_prompt();
    // Schedules the next token of every request that has only one left to compute.
    void schedule_decodes();
    // Admits waiting requests that go before all prompts computed in part, because of their class, their flow's share
    // or the scheduling policy.
    void admit_before_prefills();
    // Continues prompts that are computed in part.
    void schedule_prefills();
    // Admits waiting requests in order:
    // - A request that waits for blocks holds up the requests after it for a while. Requests of flows that are past
    //   their share are held up until it is admitted.
    // - A request that waits for another request's prefix does not hold up others. Nor does a request that would have
    //   no room even if it were alone, until lenders lend more.
    // - A request that finds no slot or no room displaces running requests of lower classes, if that helps. The
    //   displaced requests are not admitted again in the same step.
    void admit_waiting();
    // Admits waiting requests without their cached prefixes. If groups share extents, the blocks of a match may occupy
    // extents that another group of the same request lacks. The request must then compute these blocks again, or it
    // would wait forever.
    void admit_unmatched();

    // Adds drafts to the rows that sample, as far as the step's token budget and free blocks allow.
    void add_drafts();

    // Whether there is a slot for a waiting request, free or held by a request of a lower class.
    bool may_seat() const;
    bool is_empty() const { return rows_.empty(); }
    int num_displaced() const { return num_displaced_; }
    // Whether a waiting request found no room.
    bool has_refused() const { return has_refused_; }
    int num_matches() const { return num_matches_; }  // look-ups in the prefix cache
    // Whether nothing else can be planned before the step in progress is committed.
    bool must_commit() const { return must_commit_; }
    std::vector<StepRow>& rows() { return rows_; }
    // The requests that run for the first time in this step.
    std::span<Request* const> admitted() const { return admitted_; }
    // The requests of this step that skip the part of their prompts that storage has loaded.
    const std::vector<Meeting>& meetings() const { return meetings_; }

  private:
    template <class MayGo>
    void admit_while(MayGo may_go);
    std::vector<Request*> prompts_in_part() const;
    void put_back_past_share(std::vector<Request*>& prompts) const;
    bool goes_before(const Request& waiting, const Request& prompt) const;
    bool is_prefix_coming(const Request& request);
    bool is_stuck(Request& request) const;
    bool may_seat(int64_t priority) const;
    // The part of a waiting request that the prefix cache has.
    struct CacheHit {
        PrefixMatch match{};
        std::vector<int32_t> borrowed, in_host;  // the indices of the blocks that are borrowed, or lie in host memory
    };
    // The number of tokens that a waiting request would compute in this step, 0 if it has no slot, and whether it has
    // got its blocks.
    struct FirstChunk {
        int num_tokens;
        bool has_blocks;
    };
    bool admit(Request& request, int token_budget);
    CacheHit look_up(Request& request);
    FirstChunk take_blocks(Request& request, int token_budget);
    FirstChunk try_to_fit(Request& request, int longest, int token_budget);
    void begin(Request& request, CacheHit hit);
    void turn_away(Request& request, int num_tokens, int token_budget);
    std::vector<const BlockTable*> tables_below(const Request& waiting) const;
    std::vector<Request*> requests_to_displace(const Request& request, std::vector<Request*> candidates,
                                               int token_budget) const;
    bool displace(std::span<Request* const> leaving);
    bool is_in_progress(const Request& request);
    void take_out(Request& request);
    std::vector<StepRow>::iterator row_of(const Request& request);
    int make_room(Request& request, int num_tokens);
    bool must_await_loads(const Request& request, int num_tokens) const;
    bool compact(Request& request, int num_tokens, int spare);
    // The fewest of `num_tokens` tokens that a step may compute.
    int least_chunk(int num_tokens) const { return policy_.splits_prompts() ? 1 : num_tokens; }
    void add(Request& request, int num_tokens);
    int longest_chunk(Request& request);
    int blocks_to_meet(Request& request, int next, int here) const;
    int share_of_missing(const Request& request, int next, int here) const;
    std::optional<double> compute_s(int begin, int end) const;
    void meet(Request& request);
    int table_end(const Request& request, int num_tokens) const;
    int blocks_behind_front(const Request& request, int num_tokens) const;
    // Whether the prefix cache may be asked about another waiting request. A step without requests goes on looking.
    bool may_look_up() const { return num_keys_ < policy_.max_keys() || is_empty(); }
    bool is_full() const { return budget_left_ <= 0; }
    // Whether the step has no room or no time for more of a prompt.
    bool is_closed() const { return is_full() || !policy_.has_time(work_, limit_s_); }

    KvCache& cache_;
    Roster& roster_;
    Pins& pins_;
    const Policy& policy_;
    const AdmissionOrder& order_;
    FairShare& shares_;
    Alternation& alternation_;
    Refusal& refusal_;
    const double now_s_;
    const Moment moment_;
    const int64_t num_begun_;  // requests, before the step
    int budget_left_;          // tokens
    StepWork work_;            // of the step's rows, without drafts
    double limit_s_ = std::numeric_limits<double>::infinity();
    bool must_commit_ = false;
    int num_displaced_ = 0;
    int displaced_class_ = kNumClasses;  // the highest class of the displaced requests
    bool has_refused_ = false;
    bool is_matching_ = true;
    int num_matches_ = 0;
    int64_t num_keys_ = 0;  // that were looked up for waiting requests
    std::vector<StepRow> rows_;
    std::vector<Request*> admitted_;
    std::vector<Meeting> meetings_;
};

}  // namespace swiftkv
