#include "scheduler.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "../common/check.h"

namespace swiftkv {

Scheduler::Scheduler(std::vector<GroupSpec> groups, SchedulerLimits limits, std::vector<Link> lend_links,
                     std::vector<Link> borrow_links)
    : limits_(limits),
      cache_((check_setup(groups, limits, lend_links, borrow_links), groups), limits.block_size, lend_links,
             borrow_links),
      demand_(cache_, limits_),
      roster_(cache_, demand_, limits.max_num_seqs),
      policy_(cache_, limits_),
      refusal_(cache_),
      writer_(cache_, limits_) {}

// ---- requests come and go ----

void Scheduler::add_request(const NewRequest& request) {
    const std::lock_guard lock(mutex_);
    if (roster_.find(request.id))
        throw std::invalid_argument("request " + std::to_string(request.id) + " is already known");
    check_request(request, limits_);
    roster_.add(make_request(request, limits_));
    note_demand();
}

void Scheduler::set_draft(RequestId id, std::span<const TokenId> tokens) {
    const std::lock_guard lock(mutex_);
    if (std::any_of(tokens.begin(), tokens.end(), [](TokenId token) { return token < 0; }))
        throw std::invalid_argument("a draft has a token id below 0");
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

void Scheduler::abort_one(RequestId id) noexcept {
    if (Request* request = roster_.find(id)) end(*request);
}

std::vector<RequestId> Scheduler::starved(double now_s, double max_wait_s) const {
    const std::lock_guard lock(mutex_);
    std::vector<RequestId> ids;
    for (const Request* r : roster_.waiting())
        if (r->stuck_since_s >= 0 && now_s - r->stuck_since_s >= max_wait_s && !policy_.could_hold(*r))
            ids.push_back(r->id);
    return ids;
}

// ---- schedule ----

std::unique_ptr<StepPlan> Scheduler::schedule(double now_s) {
    const std::lock_guard lock(mutex_);
    if (open_.size() == 2) throw std::logic_error("schedule() while two steps are in progress");
    if (!open_.empty() && !can_plan_ahead()) return nullptr;
    return plan_step(now_s);
}

// Copies happen between the layers of a step, so blocks lie where the books say only when the step is over. Extents
// come and go only while no step is in progress.
bool Scheduler::can_plan_ahead() const {
    return !must_commit_ && !open_.back().has_copies && !cache_.is_draining() && !cache_.must_resize_staging();
}

std::unique_ptr<StepPlan> Scheduler::plan_step(double now_s) noexcept {
    must_commit_ = false;
    cache_.begin_step();
    StepBuilder step(cache_, roster_, policy_, refusal_, now_s);

    settle_lending();
    cache_.forget_idle_moves();
    // The copies go alone: whoever recalled extents waits for them, and need not wait for a step as well.
    if (cache_.has_copies()) return open(step);
    fill(step);
    note_demand();
    cache_.forget_idle_moves();

    if (!step.is_empty() || cache_.has_copies()) return open(step);
    if (open_.empty()) {
        cache_.settle();
    } else {
        cache_.cancel_step();
    }
    return nullptr;
}

void Scheduler::fill(StepBuilder& step) {
    const int num_preempted = roster_.num_preempted();
    step.admit_oversized_prompt();
    step.schedule_decodes();
    step.schedule_prefills();
    const bool has_preempted = roster_.num_preempted() > num_preempted;
    // A waiting request must not take blocks that others were made to leave, unless nobody is left for whom they did.
    if (!step.must_commit() && (!has_preempted || step.is_empty())) {
        if (has_preempted) {  // their blocks may be of other use now
            settle_lending();
            step.admit_oversized_prompt();
        }
        step.admit_waiting();
    }
    must_commit_ = step.must_commit();
    prefix_matches_total_ += step.num_matches();
}

std::unique_ptr<StepPlan> Scheduler::open(StepBuilder& step) {
    std::unique_ptr<StepPlan> plan = writer_.write(step.rows(), step.admitted(), roster_.take_preempted());
    for (const Request* r : step.admitted()) {
        prefix_query_tokens_total_ += r->prompt_len;
        prefix_hit_tokens_total_ += r->num_cached;
        borrowed_hit_tokens_total_ += r->num_cached_borrowed;
    }
    for (StepRow& row : step.rows()) {
        Request& r = *row.request;
        r.is_in_step = false;
        if (cache_.can_borrow()) row.arrivals = cache_.arrivals(r.table, ceil_div(r.num_planned(), limits_.block_size));
    }
    open_.push_back({std::move(step.rows()), cache_.has_copies()});
    return plan;
}

// ---- what others see ----

SchedulerStats Scheduler::stats() const {
    const std::lock_guard lock(mutex_);
    return {.num_running = roster_.num_running(),
            .num_waiting = static_cast<int>(roster_.waiting().size()),
            .num_preemptions_total = roster_.num_preemptions_total(),
            .prefix_matches_total = prefix_matches_total_,
            .prefix_query_tokens_total = prefix_query_tokens_total_,
            .prefix_hit_tokens_total = prefix_hit_tokens_total_,
            .borrowed_hit_tokens_total = borrowed_hit_tokens_total_,
            .step_s_total = step_s_total_,
            .groups = cache_.stats()};
}

void Scheduler::reset_prefix_cache() {
    const std::lock_guard lock(mutex_);
    cache_.reset();
}

void Scheduler::check_invariants() const {
    const std::lock_guard lock(mutex_);
    roster_.check(limits_.max_num_seqs);
    demand_.check(roster_.waiting());
    std::vector<const BlockTable*> tables;
    std::vector<const std::vector<BlockKey>*> keys;
    for (const Request* r : roster_.running()) {
        check_steps(*r);
        tables.push_back(&r->table);
        keys.push_back(&r->keys);
    }
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
