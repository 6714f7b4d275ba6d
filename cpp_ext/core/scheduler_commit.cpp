// The end of a step: tokens are appended, requests end, and some rows do not count.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "scheduler.h"

namespace swiftkv {

void Scheduler::check_is_open(const char* what) const {
    if (open_.empty()) throw std::logic_error(std::string(what) + " without a step in progress");
}

StepResult Scheduler::commit(std::span<const TokenId> sampled, double duration_s) {
    const std::lock_guard lock(mutex_);
    check_is_open("commit()");
    const std::vector<StepRow>& rows = open_.front().rows;
    const auto num_rows = std::count_if(rows.begin(), rows.end(), [](const StepRow& row) { return row.samples; });
    if (static_cast<size_t>(num_rows) != sampled.size())
        throw std::invalid_argument("commit() got " + std::to_string(sampled.size()) + " tokens, the plan has " +
                                    std::to_string(num_rows) + " logits_rows");
    step_s_total_ += duration_s;
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
    if (!row.samples) return FinishReason::kRunning;
    const FinishReason reason = r.append(token, limits_);
    if (reason != FinishReason::kRunning) {
        demand_.note_length(r);
        end(r);
    }
    return reason;
}

void Scheduler::commit_computed(const StepRow& row) {
    Request& r = *row.request;
    r.num_computed += row.num_tokens;
    r.num_scheduled -= row.num_tokens;
    r.num_unknown -= row.samples;
    if (limits_.enable_prefix_caching) {
        const int num_blocks = r.num_computed / limits_.block_size;
        refusal_.note_commit(r, num_blocks);
        cache_.commit(r.table, r.keys, num_blocks);
    }
    cache_.release_outside_window(r.table, r.num_computed);
}

void Scheduler::end(Request& r) {
    leave_steps(r, false);
    refusal_.forget(r);
    roster_.erase(r);
}

// From now on the request's rows in the steps in progress do not count.
void Scheduler::leave_steps(const Request& r, bool is_dropped) {
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
    // Also those that had no part in the step: what it moved may be theirs.
    while (!roster_.running().empty()) drop_steps(*roster_.running().back());
    cache_.settle_failed();
}

}  // namespace swiftkv
