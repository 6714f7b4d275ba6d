#include "policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "../common/check.h"

namespace swiftkv {

namespace {

constexpr int64_t kProbeBlocks = 4;  // of a prompt in a step, while step times are not known

constexpr double kHoldS = 1.0;

}  // namespace

bool Policy::Order::operator()(const Request* a, const Request* b) const {
    return std::tie(a->priority, a->arrival) < std::tie(b->priority, b->arrival);
}

bool Policy::is_prefix_coming(const Request& r, Running running) const {
    const int max_match = r.skip_prefix_match ? 0 : r.max_match_blocks(limits_.block_size);
    if (cache_.is_loading(std::span(r.keys).first(max_match))) return true;
    return std::any_of(running.begin(), running.end(), [&](const Request* other) {
        if (other->skip_prefix_match) return false;
        const int next = other->num_computed / limits_.block_size;
        // Keys are chained: if these are equal, so are all before them.
        return next < std::min(max_match, static_cast<int>(other->keys.size())) && other->keys[next] == r.keys[next];
    });
}

bool Policy::holds_up_others(const Request& r, double now_s) const {
    return std::ilogb(1 + (now_s - *r.refused_since_s) / kHoldS) % 2 == 0;
}

bool Policy::could_hold(const Request& r) const {
    const int whole = ceil_div(r.num_tokens(), limits_.block_size);
    return cache_.could_hold([&](int g) { return std::min(whole, limits_.blocks_for_one_sequence(cache_.spec(g))); });
}

bool Policy::is_oversized(const Request& r) const {
    return !splits_prompts() && r.num_tokens() > token_budget();
}

Request& Policy::victim(Running running) const {
    ensure(!running.empty(), "there is a running request to preempt");
    return *running.back();
}

bool Policy::outranks_some(int64_t priority, Running running) const {
    return !running.empty() && class_of(priority) < class_of(running.back()->priority);
}

std::vector<Request*> Policy::displaceable(const Request& waiting, Running running, int64_t num_begun) const {
    std::vector<Request*> found;
    for (size_t i = running.size(); i > 0 && outranks_some(waiting.priority, running.first(i)); --i) {
        Request* r = running[i - 1];
        const bool may_leave = class_of(r->priority) == kBatchClass || r->num_known() > r->displaced_len;
        if (may_leave && r->begun < num_begun) found.push_back(r);
    }
    const auto order_of = [](const Request* r) {
        return std::tuple(-class_of(r->priority), r->has_answer(), -r->begun);
    };
    std::sort(found.begin(), found.end(),
              [&](const Request* a, const Request* b) { return order_of(a) < order_of(b); });
    return found;
}

bool Policy::is_long(int num_left) const {
    return limits_.long_prefill_token_threshold && num_left > *limits_.long_prefill_token_threshold;
}

bool Policy::may_begin(const Request& r, Running running) const {
    const bool is_long_one = is_long(r.num_left());
    if (!limits_.max_num_partial_prefills && !is_long_one) return true;
    int num_partial = 0, num_long = 0;
    for (const Request* other : running) {
        if (class_of(other->priority) > class_of(r.priority)) break;  // `running` is in order of priority
        if (!other->is_prompt_in_part()) continue;
        ++num_partial;
        num_long += is_long(other->num_remaining());
    }
    return num_partial < limits_.max_num_partial_prefills.value_or(num_partial + 1) &&
           (!is_long_one || num_long < limits_.max_long_partial_prefills);
}

double Policy::time_limit_s(const StepWork& decodes) const {
    if (!limits_.target_tpot_s || decodes.num_rows == 0) return std::numeric_limits<double>::infinity();
    return std::max(*limits_.target_tpot_s, 2 * step_time_.predict(decodes));
}

bool Policy::has_time(const StepWork& work, double limit_s) const {
    if (std::isinf(limit_s) || work.prompt_pairs == 0) return true;
    return step_time_.is_known() && step_time_.longest_chunk(work, 0, limit_s) >= limits_.block_size;
}

int Policy::timely_chunk(const Request& r, const StepWork& work, double limit_s) const {
    if (std::isinf(limit_s)) return std::numeric_limits<int>::max();
    if (!step_time_.is_known())
        return static_cast<int>(std::min<int64_t>(kProbeBlocks * limits_.block_size, r.num_remaining()));
    return std::max(limits_.block_size, step_time_.longest_chunk(work, r.num_planned(), limit_s));
}

std::optional<double> Policy::prefill_tokens_per_s(Running running) const {
    if (!step_time_.is_known()) return {};
    StepWork work = decodes_of(running);
    const int chunk = chunk_beside(work, 0);
    work.add_row(0, chunk);
    return chunk / step_time_.predict(work);
}

std::optional<double> Policy::prefill_s(int begin, int end, Running running) const {
    if (!step_time_.is_known()) return {};
    const StepWork decodes = decodes_of(running);
    double sum_s = 0;
    while (begin < end) {
        const int chunk = splits_prompts() ? std::min(end - begin, chunk_beside(decodes, begin)) : end - begin;
        StepWork work = decodes;
        work.add_row(begin, chunk);
        sum_s += step_time_.predict(work);
        begin += chunk;
    }
    return sum_s;
}

StepWork Policy::decodes_of(Running running) {
    StepWork work;
    for (const Request* r : running)
        if (!r->is_prompt_in_part()) work.add_row(r->num_tokens() - 1, 1);
    return work;
}

int Policy::chunk_beside(const StepWork& decodes, int begin) const {
    const double limit_s = time_limit_s(decodes);
    const int most = std::max(1, token_budget() - static_cast<int>(decodes.num_rows));
    const int longest = std::isinf(limit_s) ? most : step_time_.longest_chunk(decodes, begin, limit_s);
    return std::min(most, std::max(limits_.block_size, longest));
}

int Policy::first_chunk(const Request& r, int budget, const StepWork& work, double limit_s) const {
    return splits_prompts() ? next_chunk(r, budget, work, limit_s) : r.num_remaining();
}

int Policy::next_chunk(const Request& r, int budget, const StepWork& work, double limit_s) const {
    const int threshold = limits_.long_prefill_token_threshold.value_or(budget);
    return std::min({r.num_remaining(), budget, threshold, timely_chunk(r, work, limit_s)});
}

int Policy::num_worthy_guesses(Running running, std::span<const double> chances) const {
    StepWork work = decodes_of(running);
    if (!step_time_.is_known() || work.num_rows == 0) return static_cast<int>(chances.size());
    double num_tokens = work.num_rows;
    double fastest = num_tokens / step_time_.predict(work);
    size_t num_worthy = 0;
    for (size_t i = 0; i < chances.size(); ++i) {
        work.num_tokens += 1;
        work.num_rows += 1;
        num_tokens += chances[i];
        const double tokens_per_s = num_tokens / step_time_.predict(work);
        if (tokens_per_s <= fastest) continue;
        fastest = tokens_per_s;
        num_worthy = i + 1;
    }
    return static_cast<int>(num_worthy);
}

int Policy::draft_length(const Request& r, int most) const {
    if (r.num_planned() != r.num_known()) return 0;
    // Its row samples one token more than it has draft tokens.
    return std::max(0, std::min({static_cast<int>(r.draft.size()), most, r.last_len - r.num_known() - 1}));
}

int Policy::fitting_chunk(const Request& r, int wanted, int prompt_end, Spare spare) const {
    if (!splits_prompts() || !cache_.has_windows()) return wanted;
    return cache_.window_room_end(r.table, r.num_planned() + wanted, prompt_end, spare) - r.num_planned();
}

}  // namespace swiftkv
