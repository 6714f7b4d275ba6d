// Both ends of a step: schedule() plans it, commit() takes its result. Other files fill a step (step_builder.cpp), deal
// with extents of peers (scheduler_lending.cpp: settle_lending, drop_lost), with storage (scheduler_storage.cpp) and
// with pins (scheduler_pins.cpp: clear_the_way), and check sizes (scheduler_limits.cpp).
//
// The parts:
//   cache_      the blocks of every KV group, and the prefix index
//   roster_     the requests, those that run and those that wait
//   order_      says which waiting request is next; shares_ says which tenant's, alternation_ whether the oldest is
//   policy_     says how much of a prompt a step takes, and which request leaves when blocks run out
//   refusal_    remembers the request that found no room last, until that may have changed
//   pins_       the prefixes that stay in the pool
//   demand_     counts the blocks that requests want; lenders decide by it
//   step_time_  predicts the seconds of a step
//   writer_     makes the flat arrays of a step
//   open_       the steps that are planned and not committed, two at most
//
// A public function checks its arguments and may throw. Its changes are then made by noexcept functions: an exception
// half-way would leave counts that do not add up.
#include "scheduler.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#include "../common/check.h"

namespace swiftkv {

Scheduler::Scheduler(std::vector<GroupSpec> groups, SchedulerLimits limits, std::vector<Link> lend_links,
                     std::vector<Link> borrow_links)
    : limits_(limits),
      cache_((check_setup(groups, limits, lend_links, borrow_links), groups), limits.block_size, lend_links,
             borrow_links, static_cast<int>(limits.extents_for_windows(groups))),
      demand_(cache_, limits_),
      order_(make_order(limits.policy)),
      shares_(limits.max_num_batched_tokens),
      roster_(cache_, demand_, *order_, shares_, limits.max_num_seqs),
      pins_(cache_),
      policy_(cache_, limits_, step_time_),
      refusal_(cache_),
      writer_(cache_, limits_) {}

// ---- requests come and go ----

void Scheduler::add_request(const NewRequest& request) {
    const std::lock_guard lock(mutex_);
    if (roster_.find(request.id))
        throw std::invalid_argument("request " + std::to_string(request.id) + " is already known");
    check_request(request, limits_);
    shares_.know(request.flow, request.flow_weight);
    roster_.add(make_request(request, limits_));
    note_demand();
}

void Scheduler::set_draft(RequestId id, std::span<const TokenId> tokens) {
    const std::lock_guard lock(mutex_);
    if (!are_tokens(tokens)) throw std::invalid_argument("a draft has a token id below 0");
    if (Request* request = roster_.find(id)) request->draft.assign(tokens.begin(), tokens.end());
}

bool Scheduler::has_work() const {
    const std::lock_guard lock(mutex_);
    return !roster_.is_empty() || !open_.empty() || cache_.is_draining();
}

void Scheduler::abort(std::span<const RequestId> ids) {
    const std::lock_guard lock(mutex_);
    for (RequestId id : ids) abort_one(id);
}

// Ends a request. A step in progress may still compute it; its commit ignores the result.
void Scheduler::abort_one(RequestId id) noexcept {
    if (Request* request = roster_.find(id)) end(*request);
}

std::vector<RequestId> Scheduler::starved(double now_s, double max_wait_s) {
    const std::lock_guard lock(mutex_);
    std::vector<RequestId> ids;
    for (Request* r : roster_.waiting().all()) {
        if (!r->stuck_since_s) continue;
        // It may wait for a slot now, where no step looks at it.
        if (policy_.could_hold(*r)) r->stuck_since_s.reset();
        if (r->stuck_since_s && now_s - *r->stuck_since_s >= max_wait_s) ids.push_back(r->id);
    }
    return ids;
}

// ---- schedule ----

std::unique_ptr<StepPlan> Scheduler::schedule(double now_s) {
    const std::lock_guard lock(mutex_);
    if (open_.size() == 2) throw std::logic_error("schedule() while two steps are in progress");
    if (!open_.empty() && !can_plan_ahead()) return nullptr;
    return plan_step(now_s);
}

// Whether a step may be planned while another is in progress. A step copies blocks before or while its layers run, so
// the next one must not be planned before the copies are done. Recalled extents and the layer-stream cache change only
// while no step is in progress.
bool Scheduler::can_plan_ahead() const {
    return !must_commit_ && !open_.back().has_copies && !cache_.is_draining() && !cache_.must_resize_staging();
}

std::unique_ptr<StepPlan> Scheduler::plan_step(double now_s) noexcept {
    ensure(!is_copying_, "storage has copied what it took before a step is planned");
    must_commit_ = false;
    cache_.begin_step();  // blocks that are let go from here on are in flight until this step is committed
    StepBuilder step(cache_, roster_, pins_, policy_, *order_, shares_, alternation_, refusal_, now_s);

    settle_lending();            // empties recalled extents, and fits the layer-stream cache to what is borrowed
    cache_.forget_idle_moves();  // of blocks that were let go meanwhile
    // The copies go alone: the lender that recalled extents waits for them, and should not wait for a step as well.
    if (cache_.has_copies()) return open(step);
    move_up();
    fill(step);
    meetings_.insert(meetings_.end(), step.meetings().begin(), step.meetings().end());
    note_demand();  // before drafts, which are not demand
    if (!must_commit_) step.add_drafts();
    cache_.forget_idle_moves();

    if (!step.is_empty() || cache_.has_copies() || !cache_.local_moves().empty()) return open(step);
    // There is nothing to do: the step that begin_step() began ends here.
    if (open_.empty()) {
        cache_.settle();
    } else {
        cache_.cancel_step();
    }
    return nullptr;
}

// Has the step copy blocks from host memory. The requests that wait for them find them from here on.
void Scheduler::move_up() {
    cache_.move_up();
    if (cache_.has_moves_up()) refusal_.forget();  // as in end_load()
}

// Fills a step. Running requests go on before any is admitted, except for those that the order puts before prompts. If
// prompts are not split, one that is longer than max_num_batched_tokens gets a step of its own.
void Scheduler::fill(StepBuilder& step) {
    const int num_before = roster_.num_preempted();
    // Whether a request was preempted for want of blocks. A displaced one does not count: another takes its blocks.
    const auto has_preempted = [&] { return roster_.num_preempted() - step.num_displaced() > num_before; };
    roster_.note_cached();
    if (step.may_seat()) roster_.refresh_waiting();
    step.admit_oversized_prompt();
    step.schedule_decodes();
    if (!step.must_commit() && !has_preempted()) step.admit_before_prefills();
    step.schedule_prefills();
    // No request is admitted into blocks that were just taken from a preempted one, unless the step would be empty.
    if (!step.must_commit() && (!has_preempted() || step.is_empty())) {
        if (has_preempted()) {  // without its blocks a recalled extent may be empty, or a longer prompt fit
            settle_lending();
            step.admit_oversized_prompt();
        }
        step.admit_waiting();
    }
    clear_the_way(step);
    // True if a request that has to leave takes part in the step in progress, which must be committed first.
    must_commit_ = step.must_commit();
    prefix_matches_total_ += step.num_matches();
}

// Writes the plan of the step, which is in progress from now on until it is committed.
std::unique_ptr<StepPlan> Scheduler::open(StepBuilder& step) {
    std::unique_ptr<StepPlan> plan = writer_.write(step.rows(), step.admitted(), roster_.take_preempted());
    for (const Request* r : step.admitted()) {
        prefix_query_tokens_total_ += r->prompt_len;
        prefix_hit_tokens_total_ += r->num_cached;
        borrowed_hit_tokens_total_ += std::ssize(r->borrowed_hits) * limits_.block_size;
        window_missed_tokens_total_ += r->num_window_missed;
    }
    for (const Meeting& meeting : std::exchange(meetings_, {})) {
        prefix_hit_tokens_total_ += int64_t{meeting.end - meeting.first} * limits_.block_size;
        plan->met_request_ids.push_back(meeting.id);
        plan->met_blocks.insert(plan->met_blocks.end(), {meeting.first, meeting.end});
    }
    for (StepRow& row : step.rows()) {
        Request& r = *row.request;
        r.is_in_step = false;
        // If a lender dies from which one of these blocks is copied, the row does not count.
        if (cache_.can_borrow()) row.arrivals = cache_.arrivals(r.table, ceil_div(r.num_planned(), limits_.block_size));
    }
    const bool has_copies = cache_.has_copies() || !cache_.local_moves().empty();
    open_.push_back({std::move(step.rows()), has_copies, plan->work});
    return plan;
}

// ---- commit ----

void Scheduler::check_is_open(const char* what) const {
    if (open_.empty()) throw std::logic_error(std::string(what) + " without a step in progress");
}

StepResult Scheduler::commit(std::span<const TokenId> sampled, double duration_s) {
    const std::lock_guard lock(mutex_);
    check_is_open("commit()");
    size_t num_samples = 0;
    for (const StepRow& row : open_.front().rows) num_samples += row.num_samples();
    if (num_samples != sampled.size())
        throw std::invalid_argument("commit() got " + std::to_string(sampled.size()) + " tokens, the plan has " +
                                    std::to_string(num_samples) + " logits_rows");
    step_s_total_ += duration_s;
    step_time_.observe(open_.front().work, duration_s);
    return commit_step(sampled);
}

StepResult Scheduler::commit_step(std::span<const TokenId> sampled) noexcept {
    const Step step = std::move(open_.front());
    open_.pop_front();
    StepResult result;
    for (const StepRow& row : step.rows) {
        commit_row(row, sampled.first(row.num_samples()), result);
        sampled = sampled.subspan(row.num_samples());
    }
    cache_.settle();
    if (limits_.prompt_lookup) guess();
    return result;
}

// Gives a draft to each running request whose last tokens occurred before, if it pays.
void Scheduler::guess() {
    std::vector<Draft> drafts;
    for (Request* r : roster_.running()) {
        if (!r->has_answer()) continue;
        r->draft.clear();
        const Match match = find_match(r->tokens, *limits_.prompt_lookup);
        if (match.length > 0) drafts.push_back({r, match});
    }
    share_guesses(drafts);
    for (const auto& [request, match, length] : drafts) {
        if (length == 0) request->guess_rate.rest();
        request->draft = copy_behind(match, request->tokens, length);
    }
}

// Sets the lengths of drafts: the likeliest of all guesses are made, as many as pay.
void Scheduler::share_guesses(std::span<Draft> drafts) const {
    std::vector<std::pair<double, Draft*>> guesses;  // with the chance of each that it yields a token
    for (Draft& draft : drafts) {
        double all_right = 1;
        for (int k = 0; k < limits_.prompt_lookup->num_speculative_tokens; ++k) {
            all_right *= draft.request->guess_rate.value();
            guesses.emplace_back(all_right, &draft);
        }
    }
    const auto chance_of = [](const auto& guess) { return guess.first; };
    std::ranges::stable_sort(guesses, std::greater(), chance_of);
    std::vector<double> chances(guesses.size());
    std::ranges::transform(guesses, chances.begin(), chance_of);
    const int num_worthy = policy_.num_worthy_guesses(roster_.running(), chances);
    for (int k = 0; k < num_worthy; ++k) ++guesses[k].second->length;
}

// Commits one request's part of a step. `row.request` is null if the request has ended since, or has given up its steps
// in progress. Its `is_lost` is true if blocks of such a step are gone with their lender. Either way the row does not
// count.
void Scheduler::commit_row(const StepRow& row, std::span<const TokenId> sampled, StepResult& result) {
    const auto tell = [&](TokenId token, FinishReason reason) {
        result.request_ids.push_back(row.id);
        result.token_ids.push_back(token);
        result.finish_reasons.push_back(static_cast<uint8_t>(reason));
    };
    if (!row.request || row.request->is_lost) {
        const bool is_dropped = row.request || row.is_dropped;
        if (row.request) drop_steps(*row.request);
        for (TokenId token : sampled) tell(token, is_dropped ? FinishReason::kDropped : FinishReason::kAborted);
        result.counts.push_back(0);
        return;
    }
    Request& r = *row.request;
    FinishReason reason = FinishReason::kRunning;
    size_t i = 0;
    // A token counts only if every draft token before it was right, because it was sampled to follow them.
    for (; i < sampled.size() && reason == FinishReason::kRunning; ++i) {
        if (i > 0 && sampled[i - 1] != row.draft[i - 1]) break;
        reason = sampled[i] < 0 ? FinishReason::kBroken : r.append(sampled[i], limits_);
        tell(sampled[i], reason);
    }
    shares_.charge_answer(r.flow, static_cast<int>(i));
    const int num_rejected = static_cast<int>(sampled.size() - i);
    note_guesses(r, row, static_cast<int>(i));
    for (; i < sampled.size(); ++i) tell(sampled[i], FinishReason::kRejected);
    result.counts.push_back(reason != FinishReason::kBroken);
    if (reason != FinishReason::kBroken) commit_computed(row, num_rejected);
    if (reason == FinishReason::kStop || reason == FinishReason::kLength) demand_.note_length(r);
    if (reason != FinishReason::kRunning) end(r);
}

// `num_tokens`: the tokens that count, of which the first follows no guess.
void Scheduler::note_guesses(Request& r, const StepRow& row, int num_tokens) {
    const int num_guesses = static_cast<int>(row.draft.size());
    if (num_guesses == 0) return;
    const int num_right = std::max(0, num_tokens - 1);
    r.guess_rate.note(num_right, num_guesses);
    ++drafts_total_;
    draft_tokens_total_ += num_guesses;
    accepted_draft_tokens_total_ += num_right;
}

// Counts the row's tokens as computed. The first `num_computed` tokens of a request have their KV. Steps in progress
// compute `num_scheduled` more, and sample `num_unknown` after the last known one.
void Scheduler::commit_computed(const StepRow& row, int num_rejected) {
    Request& r = *row.request;
    r.num_computed += row.num_tokens - num_rejected;
    r.num_scheduled -= row.num_tokens;
    r.num_unknown -= row.samples;
    if (limits_.enable_prefix_caching) {
        const int num_blocks = r.num_computed / limits_.block_size;
        refusal_.note_commit(r, num_blocks);
        const int num_before = r.table.num_committed;
        if (num_blocks > num_before) cache_.commit(r.table, r.keys, num_blocks, r.tokens, r.root_key);
        policy_.for_each_boundary(r, num_before, num_blocks,
                                  [&](int length, Worth worth) { cache_.keep_boundary(r.keys, length, worth); });
    }
    if (num_rejected > 0) cache_.trim(r.table, r.num_computed);
    cache_.release_outside_window(r.table, r.num_computed);
}

void Scheduler::end(Request& r) {
    leave_steps(r, false);
    refusal_.forget(r);
    std::erase(brought_, &r);
    roster_.erase(r);
}

// Makes the request's rows in the steps in progress no longer count.
void Scheduler::leave_steps(const Request& r, bool is_dropped) {
    if (r.num_scheduled == 0) return;  // it has no rows
    for (Step& step : open_) {
        for (StepRow& row : step.rows) {
            if (row.request != &r) continue;
            row.request = nullptr;
            row.is_dropped = is_dropped;
        }
    }
}

void Scheduler::drop_steps(Request& r) {
    leave_steps(r, true);
    r.is_lost = false;
    roster_.preempt(r);
}

void Scheduler::abandon() {
    const std::lock_guard lock(mutex_);
    check_is_open("abandon()");
    if (open_.size() > 1) throw std::logic_error("abandon() before commit() of the step before it");
    abandon_step();
}

void Scheduler::abandon_step() noexcept {
    open_.pop_front();
    // Drops all running requests, in the step or not: it may have moved any block, and its copies failed.
    while (!roster_.running().empty()) drop_steps(*roster_.running().back());
    cache_.settle_failed();
    pins_.drop_broken();
}

// ---- what others see ----

SchedulerStats Scheduler::stats() const {
    const std::lock_guard lock(mutex_);
    std::vector<GroupStats> groups = cache_.stats();
    for (int g = 0; g < cache_.num_groups(); ++g) groups[g].pinned = pins_.num_blocks(g);
    return {.num_running = roster_.num_running(),
            .num_waiting = static_cast<int>(roster_.waiting().size()),
            .num_preemptions_total = roster_.num_preemptions_total(),
            .num_displaced_total = roster_.num_displaced_total(),
            .prefix_matches_total = prefix_matches_total_,
            .prefix_query_tokens_total = prefix_query_tokens_total_,
            .prefix_hit_tokens_total = prefix_hit_tokens_total_,
            .borrowed_hit_tokens_total = borrowed_hit_tokens_total_,
            .window_missed_tokens_total = window_missed_tokens_total_,
            .drafts_total = drafts_total_,
            .draft_tokens_total = draft_tokens_total_,
            .accepted_draft_tokens_total = accepted_draft_tokens_total_,
            .step_s_total = step_s_total_,
            .step_time_error_ratio = step_time_.error_ratio(),
            .prefill_tokens_per_s = policy_.prefill_tokens_per_s(roster_.running()),
            .groups = std::move(groups)};
}

StepTime Scheduler::step_time() const {
    const std::lock_guard lock(mutex_);
    return step_time_;
}

void Scheduler::remember_step_time(const StepTime::Terms& coefficients) {
    const StepTime remembered = StepTime::remembered(coefficients);
    const std::lock_guard lock(mutex_);
    step_time_ = remembered;
}

void Scheduler::reset_prefix_cache() {
    const std::lock_guard lock(mutex_);
    cache_.reset();
}

void Scheduler::check_invariants() const {
    const std::lock_guard lock(mutex_);
    roster_.check(limits_.max_num_seqs);
    demand_.check(roster_.waiting().all());
    std::vector<const BlockTable*> tables;
    std::vector<const std::vector<BlockKey>*> keys;
    for (const Request* r : roster_.running()) {
        check_steps(*r);
        tables.push_back(&r->table);
        keys.push_back(&r->keys);
    }
    pins_.check(tables, keys);
    cache_.check(tables, keys);
}

void Scheduler::check_steps(const Request& r) const {
    check_that(r.num_computed < r.num_tokens(), "a running request has something left to compute");
    int num_scheduled = 0, num_unknown = 0;
    for (const Step& step : open_) {
        for (const StepRow& row : step.rows) {
            if (row.request != &r) continue;
            num_scheduled += row.num_tokens;
            num_unknown += row.samples;
        }
    }
    check_that(num_scheduled == r.num_scheduled && num_unknown == r.num_unknown, "steps in progress are counted");
    check_that(!r.is_in_step, "no step is being planned");
}

}  // namespace swiftkv
