// What comes of a step: tokens, ends, and rows that do not count.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "scheduler.h"

namespace swiftkv {

void Scheduler::check_is_open(const char* what) const {
    if (open_.empty()) throw std::logic_error(std::string(what) + " without a step in progress");
}

StepResult Scheduler::commit(std::span<const TokenId> sampled) {
    const std::lock_guard lock(mutex_);
    check_is_open("commit()");
    const std::vector<StepRow>& rows = open_.front().rows;
    const auto num_rows = std::count_if(rows.begin(), rows.end(), [](const StepRow& row) { return row.samples; });
    if (static_cast<size_t>(num_rows) != sampled.size())
        throw std::invalid_argument("commit() got " + std::to_string(sampled.size()) + " tokens, the plan has " +
                                    std::to_string(num_rows) + " logits_rows");
    return commit_step(sampled);
}

StepResult Scheduler::commit_step(std::span<const TokenId> sampled) noexcept {
    const Step step = std::move(open_.front());
    open_.pop_front();
    StepResult result;
    auto next = sampled.begin();
    for (const StepRow& row : step.rows) {
        const TokenId token = row.samples ? *next++ : 0;
        const FinishReason reason = commit_row(row, token);
        result.counts.push_back(reason < FinishReason::kAborted);
        if (!row.samples) continue;
        result.request_ids.push_back(row.id);
        result.token_ids.push_back(token);
        result.finish_reasons.push_back(static_cast<uint8_t>(reason));
    }
    cache_.settle();
    return result;
}

FinishReason Scheduler::commit_row(const StepRow& row, TokenId token) {
    if (!row.request) return row.is_dropped ? FinishReason::kDropped : FinishReason::kAborted;
    Request& r = *row.request;
    if (r.is_lost) {
        drop_steps(r);
        return FinishReason::kDropped;
    }
    if (row.samples && token < 0) {
        end(r);
        return FinishReason::kBroken;
    }
    commit_computed(row);
    return row.samples ? append_token(r, token) : FinishReason::kRunning;
}

void Scheduler::abandon() {
    const std::lock_guard lock(mutex_);
    check_is_open("abandon()");
    if (open_.size() > 1) throw std::logic_error("abandon() before commit() of the step before it");
    abandon_step();
}

void Scheduler::abandon_step() noexcept {
    open_.pop_front();
    // Also those that had no part in the step: what it moved may be theirs.
    while (!running_.empty()) drop_steps(*running_.back());
    cache_.settle_failed();
}

void Scheduler::drop_steps(Request& r) {
    leave_steps(r, true);
    r.is_lost = false;
    preempt(r);
}

void Scheduler::commit_computed(const StepRow& row) {
    Request& r = *row.request;
    r.num_computed += row.num_tokens;
    r.num_scheduled -= row.num_tokens;
    r.num_unknown -= row.samples;
    if (limits_.enable_prefix_caching) cache_.commit(r.table, r.keys, r.num_computed / limits_.block_size);
    cache_.release_outside_window(r.table, r.num_computed);
}

FinishReason Scheduler::append_token(Request& r, TokenId token) {
    r.tokens.push_back(token);
    const FinishReason reason = finish_reason(r);
    if (reason != FinishReason::kRunning) {
        demand_.note_length(r);
        end(r);
    } else if (limits_.enable_prefix_caching) {
        extend_keys(r.keys, r.root_key, r.tokens, limits_.block_size);
    }
    return reason;
}

FinishReason Scheduler::finish_reason(const Request& r) const {
    const auto& stop = r.stop_token_ids;
    const bool may_stop = r.num_known() - r.prompt_len >= r.min_tokens;
    if (may_stop && std::find(stop.begin(), stop.end(), r.tokens.back()) != stop.end()) return FinishReason::kStop;
    return is_at_limit(r, r.num_known()) ? FinishReason::kLength : FinishReason::kRunning;
}

bool Scheduler::is_at_limit(const Request& r, int num_tokens) const {
    return num_tokens - r.prompt_len >= r.max_tokens || num_tokens >= limits_.max_model_len;
}

}  // namespace swiftkv
