#include "scheduler.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "../common/check.h"

namespace swiftkv {

namespace {

// What a decoding sequence may move into the local pool within one step, so that the step stays short.
constexpr int kMaxPromotedBlocks = 32;

}  // namespace

bool Scheduler::Order::operator()(const Request* a, const Request* b) const {
    return std::tie(a->priority, a->arrival) < std::tie(b->priority, b->arrival);
}

Scheduler::Scheduler(std::vector<GroupSpec> groups, SchedulerLimits limits, std::vector<Link> lend_links,
                     std::vector<Link> borrow_links)
    : limits_(limits),
      cache_((check_setup(groups, limits, lend_links, borrow_links), groups), limits.block_size, lend_links,
             borrow_links),
      demand_(cache_, limits_),
      writer_(cache_, limits_) {
    for (int slot = limits_.max_num_seqs - 1; slot >= 0; --slot) free_slots_.push_back(slot);
    std::make_heap(free_slots_.begin(), free_slots_.end(), std::greater<>());
}

// ---- requests come and go ----

void Scheduler::add_request(const NewRequest& n) {
    const std::lock_guard lock(mutex_);
    validate(n);
    auto r = std::make_unique<Request>();
    r->id = n.id;
    r->priority = n.priority;
    r->arrival = num_arrived_++;
    r->prompt_len = static_cast<int>(n.prompt.size());
    r->max_tokens = n.max_tokens;
    r->min_tokens = n.min_tokens;
    r->skip_prefix_match = n.skip_prefix_match;
    r->stop_token_ids.assign(n.stop_token_ids.begin(), n.stop_token_ids.end());
    r->tokens.assign(n.prompt.begin(), n.prompt.end());
    r->table = cache_.make_table();
    if (limits_.enable_prefix_caching) {
        r->root_key = blake3(n.cache_namespace);
        extend_keys(r->keys, r->root_key, r->tokens, limits_.block_size);
    }
    Request& request = *requests_.emplace(n.id, std::move(r)).first->second;
    enqueue(request);
    demand_.note_length(request);
    demand_.note(num_running());
}

void Scheduler::enqueue(Request& r) noexcept {
    waiting_.insert(&r);
    demand_.add_waiting(r);
}

void Scheduler::dequeue(Request& r) {
    ensure(waiting_.erase(&r) == 1, "a request that stops waiting waited");
    r.stuck_since_s = -1;
    demand_.remove_waiting(r);
}

bool Scheduler::has_work() const {
    const std::lock_guard lock(mutex_);
    return !requests_.empty() || !open_.empty() || cache_.is_draining();
}

void Scheduler::validate(const NewRequest& n) const {
    const std::string name = "request " + std::to_string(n.id);
    if (requests_.count(n.id)) throw std::invalid_argument(name + " is already known");
    if (n.prompt.empty()) throw std::invalid_argument(name + " has an empty prompt");
    if (n.prompt.size() >= static_cast<size_t>(limits_.max_model_len))
        throw std::invalid_argument(name + " has a prompt of " + std::to_string(n.prompt.size()) +
                                    " tokens; with max_model_len " + std::to_string(limits_.max_model_len) +
                                    " at most " + std::to_string(limits_.max_model_len - 1) +
                                    " leave room for an answer");
    // Below 0 stands for what a step in progress samples.
    if (std::any_of(n.prompt.begin(), n.prompt.end(), [](TokenId token) { return token < 0; }))
        throw std::invalid_argument(name + " has a prompt with a token id below 0");
    if (n.max_tokens < 1) throw std::invalid_argument(name + " has max_tokens < 1");
    if (n.min_tokens < 0) throw std::invalid_argument(name + " has min_tokens < 0");
}

void Scheduler::abort(std::span<const RequestId> ids) {
    const std::lock_guard lock(mutex_);
    for (RequestId id : ids) abort_one(id);
}

void Scheduler::abort_one(RequestId id) noexcept {
    const auto found = requests_.find(id);
    if (found == requests_.end()) return;
    Request& r = *found->second;
    std::erase(preempted_, id);
    if (r.slot == kNone) {
        dequeue(r);
        requests_.erase(found);
    } else {
        end(r);
    }
}

void Scheduler::end(Request& r) {
    leave_steps(r, false);
    stop_running(r);
    requests_.erase(r.id);
}

// Its rows in the steps in progress do not count any more.
void Scheduler::leave_steps(const Request& r, bool is_dropped) {
    for (Step& step : open_) {
        for (StepRow& row : step.rows) {
            if (row.request != &r) continue;
            row.request = nullptr;
            row.is_dropped = is_dropped;
        }
    }
}

void Scheduler::stop_running(Request& r) {
    if (r.num_scheduled > 0) {
        cache_.retire(r.table);
    } else {
        cache_.release(r.table);
    }
    r.num_scheduled = r.num_unknown = 0;
    free_slots_.push_back(r.slot);
    std::push_heap(free_slots_.begin(), free_slots_.end(), std::greater<>());
    r.slot = kNone;
    const auto place = std::lower_bound(running_.begin(), running_.end(), &r, Order{});
    ensure(place != running_.end() && *place == &r, "a request that stops running ran");
    running_.erase(place);
}

// ---- schedule ----

std::unique_ptr<StepPlan> Scheduler::schedule(double now_s) {
    const std::lock_guard lock(mutex_);
    if (open_.size() == 2) throw std::logic_error("schedule() while two steps are in progress");
    if (!open_.empty() && !can_plan_ahead()) return nullptr;
    return plan_step(now_s);
}

std::unique_ptr<StepPlan> Scheduler::plan_step(double now_s) noexcept {
    must_commit_ = false;
    budget_left_ = limits_.max_num_batched_tokens;
    cache_.begin_step();

    settle_lending();
    cache_.forget_idle_moves();
    // Alone: who asked extents back waits for the copies, not for a step as well.
    if (cache_.has_copies()) return open_step();
    const size_t num_preempted = preempted_.size();
    admit_oversized_prompt(now_s);
    schedule_decodes();
    schedule_prefills();
    const bool has_preempted = preempted_.size() > num_preempted;
    // Who waits must not take what others have to leave, unless nobody is left for whom they do.
    if (!must_commit_ && (!has_preempted || step_.empty())) {
        if (has_preempted) {  // their blocks may be of other use now
            settle_lending();
            admit_oversized_prompt(now_s);
        }
        admit_waiting(now_s);
    }
    demand_.note(num_running());
    cache_.forget_idle_moves();

    if (!step_.empty() || cache_.has_copies()) return open_step();
    if (open_.empty()) {
        cache_.settle();
    } else {
        cache_.cancel_step();
    }
    return nullptr;
}

// Copies happen between the layers of a step, so what they move is where the books say only when that is over; and
// extents come and go only while nothing is in progress.
bool Scheduler::can_plan_ahead() const {
    return !must_commit_ && !open_.back().has_copies && !cache_.is_draining() && !cache_.must_resize_staging();
}

std::unique_ptr<StepPlan> Scheduler::open_step() {
    std::unique_ptr<StepPlan> plan = writer_.write(step_, admitted_, std::exchange(preempted_, {}));
    for (const Request* r : admitted_) {
        prefix_query_tokens_total_ += r->prompt_len;
        prefix_hit_tokens_total_ += r->num_cached;
    }
    for (StepRow& row : step_) {
        const Request& r = *row.request;
        row.request->is_in_step = false;
        if (cache_.can_borrow()) row.arrivals = cache_.arrivals(r.table, ceil_div(r.num_planned(), limits_.block_size));
    }
    open_.push_back({std::exchange(step_, {}), cache_.has_copies()});
    admitted_.clear();
    return plan;
}

// Without chunking a prompt longer than the budget has a step of its own; decoding pauses for it.
void Scheduler::admit_oversized_prompt(double now_s) {
    if (limits_.enable_chunked_prefill || free_slots_.empty()) return;
    const auto next = std::find_if(waiting_.begin(), waiting_.end(), [&](Request* r) { return !is_stuck(*r, now_s); });
    if (next == waiting_.end()) return;
    Request& r = **next;
    if (r.num_tokens() > limits_.max_num_batched_tokens && !is_being_computed(r)) admit(r, r.num_tokens());
}

void Scheduler::schedule_decodes() {
    const int spare = static_cast<int>(running_.size());
    for (size_t i = 0; i < running_.size() && budget_left_ > 0 && !must_commit_; ++i) {
        Request& r = *running_[i];
        if (r.is_in_step || r.num_remaining() != 1 || is_ending(r) || !make_room(r, 1)) continue;
        cache_.promote(r.table, spare, kMaxPromotedBlocks);
        add_to_step(r, 1);
    }
}

void Scheduler::schedule_prefills() {
    for (size_t i = 0; i < running_.size() && budget_left_ > 0 && !must_commit_; ++i) {
        Request& r = *running_[i];
        const int n = std::min(r.num_remaining(), budget_left_);
        if (!r.is_in_step && r.num_remaining() > 1 && make_room(r, n)) add_to_step(r, n);
    }
}

// In order, and nobody overtakes a request that waits for blocks. One that waits for another's prefix lets others by,
// and so does one for which there would not be room if it were alone: until more is lent.
void Scheduler::admit_waiting(double now_s) {
    for (auto it = waiting_.begin(); it != waiting_.end() && budget_left_ > 0 && !free_slots_.empty();) {
        Request& r = **it++;
        if (!is_being_computed(r) && !is_stuck(r, now_s) && !admit(r, budget_left_)) return;
    }
}

bool Scheduler::could_hold(const Request& r) const {
    for (int g = 0; g < cache_.num_groups(); ++g) {
        const int whole = ceil_div(r.num_tokens(), limits_.block_size);
        if (!cache_.could_hold(g, std::min(whole, limits_.blocks_for_one_sequence(cache_.spec(g))))) return false;
    }
    return true;
}

bool Scheduler::is_stuck(Request& r, double now_s) {
    if (could_hold(r)) {
        r.stuck_since_s = -1;
        return false;
    }
    if (r.stuck_since_s < 0) r.stuck_since_s = now_s;
    return true;
}

std::vector<RequestId> Scheduler::starved(double now_s, double max_wait_s) const {
    const std::lock_guard lock(mutex_);
    std::vector<RequestId> ids;
    for (const Request* r : waiting_)
        if (r->stuck_since_s >= 0 && now_s - r->stuck_since_s >= max_wait_s && !could_hold(*r)) ids.push_back(r->id);
    return ids;
}

bool Scheduler::admit(Request& r, int token_budget) {
    if (!r.skip_prefix_match) {
        const std::span<const BlockKey> keys(r.keys);
        r.num_computed = cache_.acquire_prefix(r.table, keys.first(max_match_blocks(r))) * limits_.block_size;
    }
    const int borrowed_hits = cache_.can_borrow() ? cache_.count_borrowed(r.table) : 0;
    const int n = limits_.enable_chunked_prefill ? std::min(r.num_remaining(), token_budget) : r.num_remaining();
    // The whole prompt must fit, beside a next block for each that runs: who is admitted should not be preempted soon.
    const int spare = static_cast<int>(running_.size());
    if (n > token_budget || !cache_.extend(r.table, r.num_computed + n, r.num_tokens(), spare)) {
        cache_.release(r.table);
        r.num_computed = 0;
        return false;
    }
    if (borrowed_hits > 0) cache_.promote(r.table, spare, std::numeric_limits<int>::max());
    dequeue(r);
    ensure(!free_slots_.empty(), "there is a row slot for who is admitted");
    std::pop_heap(free_slots_.begin(), free_slots_.end(), std::greater<>());
    r.slot = free_slots_.back();
    free_slots_.pop_back();
    running_.insert(std::lower_bound(running_.begin(), running_.end(), &r, Order{}), &r);
    if (!r.was_admitted) {
        r.was_admitted = true;
        r.num_cached = r.num_computed;
        borrowed_hit_tokens_total_ += borrowed_hits * limits_.block_size;
        admitted_.push_back(&r);
    }
    add_to_step(r, n);
    return true;
}

// The last block of a prompt is never matched whole: its last token must be computed to have a successor.
int Scheduler::max_match_blocks(const Request& r) const {
    return std::min(static_cast<int>(r.keys.size()), (r.num_tokens() - 1) / limits_.block_size);
}

// Whether a running request is going to compute a block that this one could then take from the cache.
bool Scheduler::is_being_computed(const Request& r) const {
    const int max_match = r.skip_prefix_match ? 0 : max_match_blocks(r);
    return std::any_of(running_.begin(), running_.end(), [&](const Request* other) {
        if (other->skip_prefix_match) return false;
        const int next = other->num_computed / limits_.block_size;
        // Keys are chained: equal here means equal before.
        return next < std::min(max_match, static_cast<int>(other->keys.size())) && other->keys[next] == r.keys[next];
    });
}

// Whether its last token is being sampled by a step in progress.
bool Scheduler::is_ending(const Request& r) const {
    return r.num_unknown > 0 && is_at_limit(r, r.num_tokens());
}

// Gets blocks for the next `num_tokens` tokens of a running request, from the last in order if need be.
bool Scheduler::make_room(Request& r, int num_tokens) {
    while (!cache_.extend(r.table, r.num_planned() + num_tokens, r.num_tokens(), 0)) {
        ensure(!running_.empty(), "who needs room runs");
        Request& victim = *running_.back();
        must_commit_ = !victim.is_in_step && victim.num_scheduled > 0;
        if (victim.num_scheduled > 0) return false;
        preempt(victim);
        if (&victim == &r) return false;
    }
    return true;
}

void Scheduler::preempt(Request& r) {
    stop_running(r);
    r.num_computed = 0;
    enqueue(r);
    preempted_.push_back(r.id);
    ++num_preemptions_total_;
}

void Scheduler::add_to_step(Request& r, int num_tokens) {
    const bool samples = num_tokens == r.num_remaining();
    step_.push_back({&r, r.id, num_tokens, samples});
    r.is_in_step = true;
    r.num_scheduled += num_tokens;
    r.num_unknown += samples;
    budget_left_ -= num_tokens;
}

// ---- what others see ----

SchedulerStats Scheduler::stats() const {
    const std::lock_guard lock(mutex_);
    return {.num_running = static_cast<int>(running_.size()),
            .num_waiting = static_cast<int>(waiting_.size()),
            .num_preemptions_total = num_preemptions_total_,
            .prefix_query_tokens_total = prefix_query_tokens_total_,
            .prefix_hit_tokens_total = prefix_hit_tokens_total_,
            .borrowed_hit_tokens_total = borrowed_hit_tokens_total_,
            .groups = cache_.stats()};
}

void Scheduler::reset_prefix_cache() {
    const std::lock_guard lock(mutex_);
    cache_.reset();
}

}  // namespace swiftkv
