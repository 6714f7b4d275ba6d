#include "scheduler.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>

#include "check.h"

namespace swiftkv {

namespace {

// Blocks that one sequence holds at most.
int blocks_for_one_sequence(const GroupSpec& spec, const SchedulerLimits& limits) {
    const int whole = ceil_div(limits.max_model_len, limits.block_size);
    if (spec.window == 0 || !limits.enable_chunked_prefill) return whole;
    const int chunk = ceil_div(limits.max_num_batched_tokens, limits.block_size);
    return std::min(whole, ceil_div(spec.window, limits.block_size) + chunk + 1);
}

void validate_limits(const std::vector<GroupSpec>& groups, const SchedulerLimits& limits) {
    const auto require = [](bool holds, const std::string& what) {
        if (!holds) throw std::invalid_argument(what);
    };
    require(!groups.empty(), "a scheduler needs at least one KV group");
    require(limits.block_size > 0 && limits.max_num_seqs > 0 && limits.max_num_batched_tokens > 0,
            "block_size, max_num_seqs and max_num_batched_tokens must be positive");
    require(limits.max_model_len > 1, "max_model_len must leave room for a prompt and an answer");
    for (size_t g = 0; g < groups.size(); ++g) {
        const GroupSpec& spec = groups[g];
        const std::string name = "KV group " + std::to_string(g);
        require(spec.num_layers > 0 && spec.num_blocks > 0 && spec.window >= 0,
                name + " needs num_layers > 0, num_blocks > 0 and window >= 0");
        require(int64_t{spec.num_layers} * spec.num_blocks <= std::numeric_limits<int32_t>::max(),
                name + " has more layer blocks than an int32 can count");
        const int needed = blocks_for_one_sequence(spec, limits);
        require(spec.num_blocks >= needed,
                name + " has " + std::to_string(spec.num_blocks) + " blocks; one sequence of max_model_len " +
                    std::to_string(limits.max_model_len) + " needs " + std::to_string(needed));
    }
}

}  // namespace

struct Scheduler::Request {
    RequestId id;
    int priority;
    uint64_t arrival;
    int prompt_len;
    int max_tokens;
    int min_tokens;
    bool skip_prefix_match;
    Hash root_key;
    std::vector<TokenId> stop_token_ids;

    std::vector<TokenId> tokens;  // prompt, then what was sampled
    std::vector<BlockKey> keys;   // of the full blocks of `tokens`; empty without prefix caching
    BlockTable table;
    int num_computed = 0;   // tokens whose KV is in the blocks
    int num_cached = 0;     // of them, found in the prefix cache at admission
    int num_scheduled = 0;  // tokens that the step in progress computes
    int slot = kNone;       // row slot while running
    bool was_admitted = false;

    int num_tokens() const { return static_cast<int>(tokens.size()); }
    int num_remaining() const { return num_tokens() - num_computed; }
    int num_outputs() const { return num_tokens() - prompt_len; }
};

bool Scheduler::Order::operator()(const Request* a, const Request* b) const {
    return std::tie(a->priority, a->arrival) < std::tie(b->priority, b->arrival);
}

Scheduler::Scheduler(std::vector<GroupSpec> groups, SchedulerLimits limits)
    : limits_(limits), cache_((validate_limits(groups, limits), std::move(groups)), limits.block_size) {
    for (int slot = limits_.max_num_seqs - 1; slot >= 0; --slot) free_slots_.push_back(slot);
    std::make_heap(free_slots_.begin(), free_slots_.end(), std::greater<>());
}

Scheduler::~Scheduler() = default;

// ---- requests come and go ----

void Scheduler::add_request(const NewRequest& n) {
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
    waiting_.insert(r.get());
    requests_.emplace(n.id, std::move(r));
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
    if (n.max_tokens < 1) throw std::invalid_argument(name + " has max_tokens < 1");
    if (n.min_tokens < 0) throw std::invalid_argument(name + " has min_tokens < 0");
}

void Scheduler::abort(std::span<const RequestId> ids) {
    for (RequestId id : ids) {
        const auto found = requests_.find(id);
        if (found == requests_.end()) continue;
        Request& r = *found->second;
        if (waiting_.erase(&r) == 0) {
            if (r.num_scheduled > 0) {
                cache_.retire(r.table);
                std::find_if(step_.begin(), step_.end(), [&](const StepRow& row) {
                    return row.request == &r;
                })->request = nullptr;
            }
            stop_running(r);
        }
        requests_.erase(found);
    }
}

void Scheduler::stop_running(Request& r) {
    cache_.release(r.table);
    free_slots_.push_back(r.slot);
    std::push_heap(free_slots_.begin(), free_slots_.end(), std::greater<>());
    r.slot = kNone;
    running_.erase(std::lower_bound(running_.begin(), running_.end(), &r, Order{}));
}

// ---- schedule ----

std::unique_ptr<StepPlan> Scheduler::schedule() {
    if (is_step_open_) throw std::logic_error("schedule() before commit() of the step in progress");
    step_.clear();
    admitted_.clear();
    preempted_.clear();
    budget_left_ = limits_.max_num_batched_tokens;

    if (!limits_.enable_chunked_prefill) admit_oversized_prompt();
    schedule_decodes();
    schedule_prefills();
    if (preempted_.empty()) admit_waiting();

    if (step_.empty()) return nullptr;
    is_step_open_ = true;
    return write_plan();
}

// Without chunking a prompt longer than the budget has a step of its own; decoding pauses for it.
void Scheduler::admit_oversized_prompt() {
    if (waiting_.empty() || free_slots_.empty()) return;
    Request& r = **waiting_.begin();
    if (r.num_tokens() > limits_.max_num_batched_tokens && !is_being_computed(r) && admit(r, r.num_tokens()))
        waiting_.erase(waiting_.begin());
}

void Scheduler::schedule_decodes() {
    for (size_t i = 0; i < running_.size() && budget_left_ > 0; ++i) {
        Request& r = *running_[i];
        if (r.num_scheduled == 0 && r.num_remaining() == 1 && make_room(r, 1)) add_to_step(r, 1);
    }
}

void Scheduler::schedule_prefills() {
    for (size_t i = 0; i < running_.size() && budget_left_ > 0; ++i) {
        Request& r = *running_[i];
        const int n = std::min(r.num_remaining(), budget_left_);
        if (r.num_scheduled == 0 && r.num_remaining() > 1 && make_room(r, n)) add_to_step(r, n);
    }
}

// In order, and nobody overtakes a request that waits for blocks. One that waits for another's prefix lets others by.
void Scheduler::admit_waiting() {
    for (auto it = waiting_.begin(); it != waiting_.end() && budget_left_ > 0 && !free_slots_.empty();) {
        if (is_being_computed(**it)) {
            ++it;
        } else if (admit(**it, budget_left_)) {
            it = waiting_.erase(it);
        } else {
            return;
        }
    }
}

bool Scheduler::admit(Request& r, int token_budget) {
    if (!r.skip_prefix_match) {
        const std::span<const BlockKey> keys(r.keys);
        r.num_computed = cache_.acquire_prefix(r.table, keys.first(max_match_blocks(r))) * limits_.block_size;
    }
    const int n = limits_.enable_chunked_prefill ? std::min(r.num_remaining(), token_budget) : r.num_remaining();
    // The whole prompt must fit, beside a next block for each that runs: who is admitted should not be preempted soon.
    const int spare = static_cast<int>(running_.size());
    if (n > token_budget || !cache_.extend(r.table, r.num_computed + n, r.num_tokens(), spare)) {
        cache_.release(r.table);
        r.num_computed = 0;
        return false;
    }
    std::pop_heap(free_slots_.begin(), free_slots_.end(), std::greater<>());
    r.slot = free_slots_.back();
    free_slots_.pop_back();
    running_.insert(std::lower_bound(running_.begin(), running_.end(), &r, Order{}), &r);
    if (!r.was_admitted) {
        r.was_admitted = true;
        r.num_cached = r.num_computed;
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

// Gets blocks for the next `num_tokens` tokens of a running request, from the last in order if need be.
bool Scheduler::make_room(Request& r, int num_tokens) {
    while (!cache_.extend(r.table, r.num_computed + num_tokens, r.num_tokens(), 0)) {
        Request& victim = *running_.back();
        if (victim.num_scheduled > 0) return false;
        preempt(victim);
        if (&victim == &r) return false;
    }
    return true;
}

void Scheduler::preempt(Request& r) {
    stop_running(r);
    r.num_computed = 0;
    waiting_.insert(&r);
    preempted_.push_back(r.id);
    ++num_preemptions_total_;
}

void Scheduler::add_to_step(Request& r, int num_tokens) {
    r.num_scheduled = num_tokens;
    budget_left_ -= num_tokens;
    step_.push_back({&r, r.id, num_tokens, num_tokens == r.num_remaining()});
}

std::unique_ptr<StepPlan> Scheduler::write_plan() {
    auto plan = std::make_unique<StepPlan>();
    plan->query_starts.push_back(0);
    plan->block_tables.resize(cache_.num_groups());
    plan->table_starts.assign(cache_.num_groups(), {0});
    for (const StepRow& row : step_) write_row(*plan, row);
    for (const Request* r : admitted_) {
        plan->new_request_ids.push_back(r->id);
        plan->new_cached_tokens.push_back(r->num_cached);
        prefix_query_tokens_total_ += r->prompt_len;
        prefix_hit_tokens_total_ += r->num_cached;
    }
    plan->preempted_request_ids = preempted_;
    return plan;
}

void Scheduler::write_row(StepPlan& plan, const StepRow& row) const {
    const Request& r = *row.request;
    const int begin = r.num_computed, end = begin + row.num_tokens;
    plan.token_ids.insert(plan.token_ids.end(), r.tokens.begin() + begin, r.tokens.begin() + end);
    for (int position = begin; position < end; ++position) plan.positions.push_back(position);
    if (row.samples) {
        plan.logits_rows.push_back(static_cast<int32_t>(plan.token_ids.size()) - 1);
        plan.logits_seqs.push_back(static_cast<int32_t>(plan.request_ids.size()));
    }
    plan.query_starts.push_back(static_cast<int32_t>(plan.token_ids.size()));
    plan.context_lens.push_back(end);
    plan.request_ids.push_back(r.id);
    plan.row_slots.push_back(r.slot);
    plan.num_prompt_tokens += std::max(0, std::min(end, r.prompt_len) - begin);
    const int num_blocks = ceil_div(end, limits_.block_size);
    for (int g = 0; g < cache_.num_groups(); ++g) {
        const std::vector<int32_t>& entries = r.table.groups[g].entries;
        plan.block_tables[g].insert(plan.block_tables[g].end(), entries.begin(), entries.begin() + num_blocks);
        plan.table_starts[g].push_back(static_cast<int32_t>(plan.block_tables[g].size()));
    }
}

// ---- commit ----

StepResult Scheduler::commit(std::span<const TokenId> sampled) {
    if (!is_step_open_) throw std::logic_error("commit() without a step in progress");
    const auto num_rows = std::count_if(step_.begin(), step_.end(), [](const StepRow& row) { return row.samples; });
    if (static_cast<size_t>(num_rows) != sampled.size())
        throw std::invalid_argument("commit() got " + std::to_string(sampled.size()) + " tokens, the plan has " +
                                    std::to_string(num_rows) + " logits_rows");
    StepResult result;
    auto token = sampled.begin();
    for (const StepRow& row : step_) {
        if (row.request) commit_computed(row);
        if (!row.samples) continue;
        const FinishReason reason = row.request ? append_token(*row.request, *token) : FinishReason::kAborted;
        result.request_ids.push_back(row.id);
        result.token_ids.push_back(*token++);
        result.finish_reasons.push_back(static_cast<uint8_t>(reason));
    }
    cache_.settle();
    step_.clear();
    is_step_open_ = false;
    return result;
}

void Scheduler::commit_computed(const StepRow& row) {
    Request& r = *row.request;
    r.num_computed += row.num_tokens;
    r.num_scheduled = 0;
    if (limits_.enable_prefix_caching) cache_.commit(r.table, r.keys, r.num_computed / limits_.block_size);
    cache_.release_outside_window(r.table, r.num_computed);
}

FinishReason Scheduler::append_token(Request& r, TokenId token) {
    r.tokens.push_back(token);
    const FinishReason reason = finish_reason(r);
    if (reason != FinishReason::kRunning) {
        stop_running(r);
        requests_.erase(r.id);
    } else if (limits_.enable_prefix_caching) {
        extend_keys(r.keys, r.root_key, r.tokens, limits_.block_size);
    }
    return reason;
}

FinishReason Scheduler::finish_reason(const Request& r) const {
    const auto& stop = r.stop_token_ids;
    if (r.num_outputs() >= r.min_tokens && std::find(stop.begin(), stop.end(), r.tokens.back()) != stop.end())
        return FinishReason::kStop;
    if (r.num_outputs() >= r.max_tokens || r.num_tokens() >= limits_.max_model_len) return FinishReason::kLength;
    return FinishReason::kRunning;
}

// ---- what others see ----

SchedulerStats Scheduler::stats() const {
    return {.num_running = static_cast<int>(running_.size()),
            .num_waiting = static_cast<int>(waiting_.size()),
            .num_preemptions_total = num_preemptions_total_,
            .prefix_query_tokens_total = prefix_query_tokens_total_,
            .prefix_hit_tokens_total = prefix_hit_tokens_total_,
            .groups = cache_.stats()};
}

void Scheduler::check_invariants() const {
    std::vector<const BlockTable*> tables;
    std::vector<const std::vector<BlockKey>*> keys;
    std::vector<int> slots = free_slots_;
    for (const Request* r : running_) {
        check_that(waiting_.count(const_cast<Request*>(r)) == 0, "a request runs or waits, not both");
        check_that(r->num_computed < r->num_tokens(), "a running request has something left to compute");
        check_that(r->num_scheduled == 0 || is_step_open_, "only a step in progress schedules tokens");
        tables.push_back(&r->table);
        keys.push_back(&r->keys);
        slots.push_back(r->slot);
    }
    for (const Request* r : waiting_) {
        check_that(r->num_computed == 0 && r->slot == kNone, "a waiting request has computed nothing");
        for (const auto& group : r->table.groups) check_that(group.entries.empty(), "a waiting request holds no block");
    }
    std::sort(slots.begin(), slots.end());
    for (int i = 0; i < static_cast<int>(slots.size()); ++i) check_that(slots[i] == i, "every row slot has one owner");
    check_that(static_cast<int>(slots.size()) == limits_.max_num_seqs, "every row slot is accounted for");
    check_that(std::is_sorted(running_.begin(), running_.end(), Order{}), "running requests are in order");
    check_that(running_.size() + waiting_.size() == requests_.size(), "every request runs or waits");
    cache_.check(tables, keys);
}

}  // namespace swiftkv
