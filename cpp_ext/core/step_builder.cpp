#include "step_builder.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <ranges>
#include <utility>

#include "../common/check.h"

namespace swiftkv {

void StepBuilder::admit_oversized_prompt() {
    if (policy_.splits_prompts() || !may_seat()) return;
    WaitingQueue::Cursor waiting = roster_.waiting().in_order(moment_);
    Request* r = waiting.next();
    while (r && is_stuck(*r)) r = waiting.next();
    if (!r || !may_seat(r->priority) || !policy_.is_oversized(*r)) return;
    if (!policy_.is_prefix_coming(*r, roster_.running())) admit(*r, r->num_tokens());
}

void StepBuilder::schedule_decodes() {
    const std::vector<Request*>& running = roster_.running();
    const int spare = policy_.spare_blocks(running);
    int num_guesses = 0;
    for (size_t i = 0; i < running.size() && !is_full() && !must_commit_; ++i) {
        Request& r = *running[i];
        if (r.is_in_step || r.num_remaining() != 1 || r.is_ending() || make_room(r, 1) == 0) continue;
        cache_.promote(r.table, spare, policy_.max_promoted_blocks());
        add(r, 1);
        num_guesses += static_cast<int>(r.draft.size());
    }
    limit_s_ = policy_.time_limit_s(work_) - policy_.guesses_s(num_guesses);
}

// Returns the running prompts that are computed in part and not yet in the step, in order.
std::vector<Request*> StepBuilder::prompts_in_part() const {
    std::vector<Request*> prompts;
    for (Request* r : roster_.running())
        if (!r->is_in_step && r->num_remaining() > 1) prompts.push_back(r);
    if (order_.interrupts_prompts())
        std::sort(prompts.begin(), prompts.end(),
                  [&](const Request* a, const Request* b) { return order_.goes_before(*a, *b, moment_); });
    if (shares_.is_shared()) put_back_past_share(prompts);
    return prompts;
}

// Moves prompts of flows that are past their share after the others of their priority, as in the waiting queue.
void StepBuilder::put_back_past_share(std::vector<Request*>& prompts) const {
    std::map<int64_t, int64_t> least;  // of the counters, by priority
    for (const Request* r : prompts) {
        int64_t& counter = least.try_emplace(r->priority, shares_.counter(r->flow)).first->second;
        counter = std::min(counter, shares_.counter(r->flow));
    }
    const auto order_of = [&](const Request* r) {
        return std::pair(r->priority, shares_.is_past_counter(r->flow, least.at(r->priority)));
    };
    std::stable_sort(prompts.begin(), prompts.end(),
                     [&](const Request* a, const Request* b) { return order_of(a) < order_of(b); });
}

bool StepBuilder::goes_before(const Request& waiting, const Request& prompt) const {
    const int own = class_of(waiting.priority), other = class_of(prompt.priority);
    if (own != other) return own < other;
    if (shares_.is_shared() && waiting.priority == prompt.priority) {
        if (shares_.is_past(prompt.flow, waiting.flow)) return true;
        if (shares_.is_past(waiting.flow, prompt.flow)) return false;
    }
    return order_.interrupts_prompts() && order_.goes_before(waiting, prompt, moment_);
}

void StepBuilder::schedule_prefills() {
    for (Request* r : prompts_in_part()) {
        if (is_closed() || must_commit_) return;
        if (r->slot == kNone) continue;  // preempted for another
        const int longest = longest_chunk(*r);
        if (longest == 0) continue;
        const int n = std::min(longest, policy_.next_chunk(*r, budget_left_, work_, limit_s_));
        if (const int fitting = make_room(*r, n); fitting > 0) add(*r, fitting);
    }
}

template <class MayGo>
void StepBuilder::admit_while(MayGo may_go) {
    WaitingQueue::Cursor waiting = roster_.waiting().in_order(moment_);
    int num_refused = 0;
    const Request* refused = nullptr;  // the first one
    for (int i = 0; i < policy_.max_looks() && may_look_up() && !is_closed() && may_seat(); ++i) {
        Request* r = waiting.next();
        if (!r || !may_seat(r->priority) || class_of(r->priority) >= displaced_class_ || !may_go(*r)) return;
        if (refused && shares_.is_past(r->flow, refused->flow)) return;
        if (!policy_.may_begin(*r, roster_.running()) || is_prefix_coming(*r)) continue;
        if (is_stuck(*r) || admit(*r, budget_left_)) continue;
        if (must_commit_ || !roster_.has_free_slot()) return;
        if (++num_refused == policy_.max_refusals()) return;
        if (num_refused > 1) continue;
        refused = r;
        if (!r->refused_since_s) r->refused_since_s = now_s_;
        if (policy_.holds_up_others(*r, now_s_)) return;
    }
}

void StepBuilder::admit_before_prefills() {
    if (roster_.waiting().size() == 0 || !may_seat()) return;
    const bool may_interrupt = order_.interrupts_prompts() || shares_.is_shared() ||
                               policy_.outranks_some(roster_.waiting().first_priority(), roster_.running());
    if (!may_interrupt) return;
    const std::vector<Request*> prompts = prompts_in_part();
    if (prompts.empty()) return;
    const Request& first = *prompts.front();
    // If the first prompt has been displaced, all prompts are of its class, the lowest.
    admit_while([&](const Request& r) { return first.slot == kNone || goes_before(r, first); });
}

void StepBuilder::admit_waiting() {
    admit_while([](const Request&) { return true; });
}

void StepBuilder::admit_unmatched() {
    is_matching_ = false;
    admit_oversized_prompt();
    admit_waiting();
}

// Counts the keys, which are looked up while anything loads.
bool StepBuilder::is_prefix_coming(const Request& r) {
    if (cache_.has_loading()) num_keys_ += std::ssize(r.keys);
    return policy_.is_prefix_coming(r, roster_.running());
}

// Whether the request would have no room even if it were alone. Notes since when.
bool StepBuilder::is_stuck(Request& r) const {
    if (policy_.could_hold(r)) {
        r.stuck_since_s.reset();
        return false;
    }
    if (!r.stuck_since_s) r.stuck_since_s = now_s_;
    return true;
}

bool StepBuilder::may_seat() const {
    return roster_.waiting().size() > 0 && may_seat(roster_.waiting().first_priority());
}

bool StepBuilder::may_seat(int64_t priority) const {
    return roster_.has_free_slot() || policy_.outranks_some(priority, roster_.running());
}

bool StepBuilder::admit(Request& r, int token_budget) {
    std::vector<Request*> displaceable = policy_.displaceable(r, roster_.running(), num_begun_);
    if (displaceable.empty() && !roster_.has_free_slot()) return false;
    if (is_matching_ && refusal_.still_holds(r, roster_.num_running(), token_budget, !displaceable.empty())) {
        has_refused_ = true;
        return false;
    }
    CacheHit hit = look_up(r);
    const auto [num_tokens, has_blocks] = take_blocks(r, token_budget);
    if (!has_blocks) {
        const std::vector<Request*> leaving = requests_to_displace(r, std::move(displaceable), token_budget);
        turn_away(r, num_tokens, token_budget);
        return displace(leaving) && admit(r, token_budget);
    }
    begin(r, std::move(hit));
    add(r, num_tokens);
    return true;
}

// Gives a waiting request the blocks of its prompt that are cached.
StepBuilder::CacheHit StepBuilder::look_up(Request& r) {
    CacheHit hit;
    if (!r.skip_prefix_match && is_matching_) {
        const int max_match = r.max_match_blocks(cache_.block_size());
        hit.match = cache_.acquire_prefix(r.table, std::span(r.keys).first(max_match));
        r.num_computed = hit.match.length * cache_.block_size();
        r.num_shared_blocks = hit.match.num_known < max_match ? hit.match.num_known : 0;
        ++num_matches_;
        num_keys_ += max_match;
    }
    if (cache_.can_borrow()) hit.borrowed = cache_.blocks_in(Place::kPeer, r.table);
    if (cache_.can_attend_host()) hit.in_host = cache_.blocks_in(Place::kHost, r.table);
    return hit;
}

// Gets the other blocks of a waiting request, if there is a slot and room. The whole prompt must fit, even if this step
// computes only a part.
StepBuilder::FirstChunk StepBuilder::take_blocks(Request& r, int token_budget) {
    const int longest = longest_chunk(r);
    if (!roster_.has_free_slot()) return {0, false};
    FirstChunk chunk = try_to_fit(r, longest, token_budget);
    const bool may_compact = !chunk.has_blocks && chunk.num_tokens <= token_budget;
    if (may_compact && compact(r, r.num_remaining(), policy_.spare_blocks(roster_.running())))
        chunk = try_to_fit(r, longest, token_budget);
    return chunk;
}

StepBuilder::FirstChunk StepBuilder::try_to_fit(Request& r, int longest, int token_budget) {
    const int spare = policy_.spare_blocks(roster_.running());
    const int wanted = std::min(longest, policy_.first_chunk(r, token_budget, work_, limit_s_));
    const int n = policy_.fitting_chunk(r, wanted, table_end(r, wanted), {spare, blocks_behind_front(r, wanted)});
    const bool has_blocks =
        n > 0 && n <= token_budget &&
        cache_.extend(r.table, r.num_computed + n, table_end(r, n), {spare, blocks_behind_front(r, n)});
    return {n, has_blocks};
}

// Lets a waiting request run that has its blocks.
void StepBuilder::begin(Request& r, CacheHit hit) {
    if (!hit.borrowed.empty())
        cache_.promote(r.table, policy_.spare_blocks(roster_.running()), std::numeric_limits<int>::max());
    roster_.start(r);
    alternation_.take(moment_, r.num_remaining());
    refusal_.forget();
    const int num_found = r.table.num_committed;
    policy_.for_each_boundary(r, num_found - 1, num_found,
                              [&](int length, Worth worth) { cache_.keep_boundary(r.keys, length, worth); });
    if (!r.was_admitted) {
        r.was_admitted = true;
        r.num_cached = r.num_computed;
        r.begun_s = now_s_;
        r.borrowed_hits = std::move(hit.borrowed);
        r.host_hits = std::move(hit.in_host);
        r.num_window_missed = (hit.match.num_known - hit.match.length) * cache_.block_size();
        shares_.charge_prompt(r.flow, r.num_remaining());
        admitted_.push_back(&r);
    }
}

// Refuses a waiting request for which there was no room for `num_tokens` tokens.
void StepBuilder::turn_away(Request& r, int num_tokens, int token_budget) {
    const int chunk_end = r.num_computed + std::max(num_tokens, 1);
    const int spare = policy_.spare_blocks(roster_.running());
    const int short_group =
        num_tokens > token_budget ? kNone : cache_.short_group(r.table, chunk_end, r.num_tokens(), {spare});
    Refusal::Lack lack;
    if (short_group != kNone) {
        const auto growth_without = [&](std::span<const BlockTable* const> leaving) {
            const int left = spare - static_cast<int>(leaving.size());
            return cache_.least_growth(short_group, r.table, chunk_end, r.num_tokens(), left, leaving);
        };
        lack = {short_group, growth_without({}), growth_without(tables_below(r))};
    }
    has_refused_ = true;
    cache_.put_back(r.table);
    r.num_computed = 0;
    if (is_matching_) refusal_.note(r, roster_.num_running(), token_budget, lack);
}

// Returns the tables of all running requests of lower classes than this one's, whether they would give way or not.
std::vector<const BlockTable*> StepBuilder::tables_below(const Request& waiting) const {
    std::vector<const BlockTable*> tables;
    for (const Request* r : roster_.running())
        if (class_of(r->priority) > class_of(waiting.priority)) tables.push_back(&r->table);
    return tables;
}

// Returns the first of the `candidates`: as many as must leave to make a slot and room for a request, whose table has
// the blocks that it found in the cache. Returns none if all of them do not suffice, or the step has too few tokens
// left.
std::vector<Request*> StepBuilder::requests_to_displace(const Request& r, std::vector<Request*> candidates,
                                                        int token_budget) const {
    if (candidates.empty() || policy_.first_chunk(r, token_budget, work_, limit_s_) > token_budget) return {};
    std::vector<const BlockTable*> tables;
    for (const Request* other : candidates) tables.push_back(&other->table);
    const int least = least_chunk(r.num_remaining());
    const int count = cache_.releases_needed(r.table, r.num_computed + least, r.num_tokens(),
                                             policy_.spare_blocks(roster_.running()), tables);
    if (count == kNone) return {};
    candidates.resize(std::max(count, roster_.has_free_slot() ? 0 : 1));
    return candidates;
}

// Displaces these requests, unless a step in progress has one of them. Returns whether it did.
bool StepBuilder::displace(std::span<Request* const> leaving) {
    if (leaving.empty()) return false;
    must_commit_ = std::any_of(leaving.begin(), leaving.end(), [&](const Request* r) { return is_in_progress(*r); });
    if (must_commit_) return false;
    for (Request* r : leaving) {
        if (r->is_in_step) take_out(*r);
        roster_.displace(*r);
        displaced_class_ = std::min(displaced_class_, class_of(r->priority));
        ++num_displaced_;
    }
    return true;
}

std::vector<StepRow>::iterator StepBuilder::row_of(const Request& in_step) {
    const auto found =
        std::find_if(rows_.begin(), rows_.end(), [&](const StepRow& row) { return row.request == &in_step; });
    ensure(found != rows_.end(), "a request in the step has a row");
    return found;
}

// Whether a step in progress has the request, not counting the one that is being planned.
bool StepBuilder::is_in_progress(const Request& r) {
    return r.num_scheduled > (r.is_in_step ? row_of(r)->num_tokens : 0);
}

// Takes the request's row out of the step.
void StepBuilder::take_out(Request& r) {
    const auto row = row_of(r);
    r.is_in_step = false;
    r.num_scheduled -= row->num_tokens;
    r.num_unknown -= row->samples;
    budget_left_ += row->num_tokens;
    rows_.erase(row);
    work_ = {};
    for (const StepRow& other : rows_) work_.add_row(other.request->num_planned() - other.num_tokens, other.num_tokens);
}

// Gets blocks for the next `num_tokens` tokens of a running request, or for fewer if sliding-window groups have no more
// room. Preempts others if need be. Returns the number of tokens; 0 if there is no room.
int StepBuilder::make_room(Request& r, int num_tokens) {
    r.awaits_loads = false;
    while (true) {
        const int fitting = policy_.fitting_chunk(r, num_tokens, table_end(r, num_tokens), {});
        if (fitting > 0 && cache_.extend(r.table, r.num_planned() + fitting, table_end(r, fitting), {})) return fitting;
        if (compact(r, num_tokens, 0)) continue;
        Request& victim = policy_.victim(roster_.running());
        must_commit_ = is_in_progress(victim);
        if (must_commit_ || victim.begun >= num_begun_) return 0;
        r.awaits_loads = &victim == &r && must_await_loads(r, num_tokens);
        if (r.awaits_loads) return 0;
        if (roster_.num_running() == 1 && pins_.give_way()) continue;
        if (victim.is_in_step) take_out(victim);
        roster_.preempt(victim);
        if (&victim == &r) return 0;
    }
}

// Whether a request must keep its blocks until loads have ended and free the blocks that it lacks. Otherwise it would
// be preempted, and a request that does not match the prefix cache would compute the same tokens again and again.
bool StepBuilder::must_await_loads(const Request& r, int num_tokens) const {
    const int least = least_chunk(num_tokens);
    return r.skip_prefix_match && cache_.is_short_of_loads(r.table, r.num_planned() + least, table_end(r, least));
}

// Moves used blocks to make room for the least part of a request that a step can compute; returns false if that does
// not help.
bool StepBuilder::compact(Request& r, int num_tokens, int spare) {
    if (!cache_.shares_extents()) return false;
    std::vector<BlockTable*> tables = roster_.running_tables();
    for (BlockTable* pinned : pins_.tables()) tables.push_back(pinned);
    if (std::find(tables.begin(), tables.end(), &r.table) == tables.end()) tables.push_back(&r.table);
    const int least = least_chunk(num_tokens);
    return cache_.compact(r.table, r.num_planned() + least, table_end(r, least), spare, tables);
}

// ---- the front of a prompt is computed while storage loads its back ----

// Returns the most tokens that the next chunk of a prompt may have. While storage loads the back, chunks end where the
// part that is loading begins. If blocks are still missing then, the request computes some of them until it meets the
// loaded part. Returns 0 while the request waits: for the missing blocks or, if all of the back is here, for the step
// in progress that computes it, after which it skips the back.
int StepBuilder::longest_chunk(Request& r) {
    if (r.back_end == 0) return r.num_remaining();
    const int next = r.num_planned() / cache_.block_size();
    const Back back = cache_.find_back(std::span(r.keys).first(r.back_end), next);
    if (back.coming == r.back_end) {  // the back was not loaded, or is gone again
        r.back_end = 0;
        return r.num_remaining();
    }
    if (back.here <= next) {
        if (r.num_scheduled > 0) return 0;
        meet(r);
        return r.num_remaining();
    }
    const int end = back.coming > next ? back.coming : next + blocks_to_meet(r, next, back.here);
    return std::max(0, end * cache_.block_size() - r.num_planned());
}

// Returns how many of the missing blocks, `next` to `here`, the request computes: as many as take no longer than
// storage takes for the others, by its speed since the request began. That may be 0: then waiting is expected to be
// faster. It is at most half, because a block counts as loaded only when its last part is here.
int StepBuilder::blocks_to_meet(Request& r, int next, int here) const {
    const int num_begun = r.num_cached / cache_.block_size();
    const std::optional<double> front_s = compute_s(num_begun, next);
    const double elapsed_s = now_s_ - r.begun_s;
    const auto read_bytes = static_cast<double>(cache_.needed_bytes(here, r.back_end, r.back_end));
    if (next <= num_begun || !front_s || elapsed_s <= 0 || read_bytes == 0) return share_of_missing(r, next, here);
    if (!r.front_slowness) r.front_slowness = elapsed_s / *front_s;
    const auto takes_longer = [&](int count) {
        const auto left_bytes = static_cast<double>(cache_.needed_bytes(next + count, here, r.back_end));
        return *r.front_slowness * *compute_s(next, next + count) > elapsed_s * left_bytes / read_bytes;
    };
    const auto counts = std::views::iota(1, ceil_div(here - next, 2) + 1);
    return static_cast<int>(std::ranges::partition_point(counts, std::not_fn(takes_longer)) - counts.begin());
}

// Returns the same while times are not known: the share that the request has computed of the blocks that it and storage
// have brought so far, but at least one block.
int StepBuilder::share_of_missing(const Request& r, int next, int here) const {
    const int64_t computed = r.was_admitted ? next - r.num_cached / cache_.block_size() : 0;
    const int64_t both = computed + r.back_end - here + 2;
    const int64_t share = ((here - next) * (computed + 1) + both - 1) / both;
    return std::min(ceil_div(here - next, 2), static_cast<int>(share));
}

// Returns the seconds that blocks `begin` to `end` of a prompt are expected to take beside the running requests.
std::optional<double> StepBuilder::compute_s(int begin, int end) const {
    return policy_.prefill_s(begin * cache_.block_size(), end * cache_.block_size(), roster_.running());
}

void StepBuilder::meet(Request& r) {
    const int end = std::exchange(r.back_end, 0);
    meetings_.push_back({r.id, r.table.num_committed, end});
    // At admission its flow was charged for all that was not here.
    if (r.was_admitted) shares_.refund_prompt(r.flow, end * cache_.block_size() - r.num_planned());
    cache_.take_back(r.table, std::span(r.keys).first(end));
    r.num_computed = end * cache_.block_size();
}

// Returns the number of tokens for which a request that computes the next `num_tokens` needs blocks of full-attention
// groups: all its tokens, but while storage loads its back, only those that it is certain to compute.
int StepBuilder::table_end(const Request& r, int num_tokens) const {
    return r.back_end > 0 ? r.num_planned() + num_tokens : r.num_tokens();
}

// Returns the number of blocks that a request will need after the next `num_tokens`, without those loading for it.
int StepBuilder::blocks_behind_front(const Request& r, int num_tokens) const {
    if (r.back_end == 0) return 0;
    const int block_size = cache_.block_size();
    const Back back = cache_.find_back(std::span(r.keys).first(r.back_end), r.num_planned() / block_size);
    const int num_left = ceil_div(r.num_tokens(), block_size) - ceil_div(r.num_planned() + num_tokens, block_size);
    return std::max(0, num_left - (back.here - back.coming));
}

void StepBuilder::add(Request& r, int num_tokens) {
    const bool samples = num_tokens == r.num_remaining();
    rows_.push_back({&r, r.id, num_tokens, samples});
    r.is_in_step = true;
    r.num_scheduled += num_tokens;
    r.num_unknown += samples;
    budget_left_ -= num_tokens;
    work_.add_row(r.num_planned() - num_tokens, num_tokens);
}

// Drafts take nothing that others may want: no token of the step, no cached block, and no block that a request needs
// next.
void StepBuilder::add_drafts() {
    const int spare = policy_.spare_blocks(roster_.running());
    int num_samples = 0;
    for (const StepRow& row : rows_) num_samples += row.samples;
    for (StepRow& row : rows_) {
        Request& r = *row.request;
        if (r.draft.empty()) continue;
        const int wanted = policy_.draft_length(r, std::min(budget_left_, policy_.max_samples() - num_samples));
        const int end = r.num_planned(), held = cache_.capacity(r.table) - end;
        const int length = cache_.has_free(r.table, end + wanted, spare) ? wanted : std::min(wanted, held);
        if (length <= 0 || !cache_.extend(r.table, end + length, end + length, {})) continue;
        row.draft.assign(r.draft.begin(), r.draft.begin() + length);
        row.num_tokens += length;
        r.num_scheduled += length;
        num_samples += length;
        budget_left_ -= length;
    }
}

}  // namespace swiftkv
