// The end of a step: tokens are appended, requests end, and some rows do not count.
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
    size_t num_samples = 0;
    for (const StepRow& row : open_.front().rows) num_samples += row.num_samples();
    if (num_samples != sampled.size())
        throw std::invalid_argument("commit() got " + std::to_string(sampled.size()) + " tokens, the plan has " +
                                    std::to_string(num_samples) + " logits_rows");
    step_s_total_ += duration_s;
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
    return result;
}

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
    // A token counts if the tokens before it, which it was sampled behind, are those that the request has.
    for (; i < sampled.size() && reason == FinishReason::kRunning; ++i) {
        if (i > 0 && sampled[i - 1] != row.draft[i - 1]) break;
        reason = sampled[i] < 0 ? FinishReason::kBroken : r.append(sampled[i], limits_);
        tell(sampled[i], reason);
    }
    const int num_rejected = static_cast<int>(sampled.size() - i);
    for (; i < sampled.size(); ++i) tell(sampled[i], FinishReason::kRejected);
    result.counts.push_back(reason != FinishReason::kBroken);
    if (reason != FinishReason::kBroken) commit_computed(row, num_rejected);
    if (reason == FinishReason::kStop || reason == FinishReason::kLength) demand_.note_length(r);
    if (reason != FinishReason::kRunning) end(r);
}

void Scheduler::commit_computed(const StepRow& row, int num_rejected) {
    Request& r = *row.request;
    r.num_computed += row.num_tokens - num_rejected;
    r.num_scheduled -= row.num_tokens;
    r.num_unknown -= row.samples;
    if (limits_.enable_prefix_caching) {
        const int num_blocks = r.num_computed / limits_.block_size;
        refusal_.note_commit(r, num_blocks);
        cache_.commit(r.table, r.keys, num_blocks);
    }
    if (num_rejected > 0) cache_.trim(r.table, r.num_computed);
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
