// The storage calls of the scheduler. The thread that makes the steps calls them between two steps.
#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

#include "scheduler.h"

namespace swiftkv {
namespace {

std::span<const BlockKey> matchable(const Request& r, int block_size) {
    return std::span(r.keys).first(r.skip_prefix_match ? 0 : r.max_match_blocks(block_size));
}

void check_has_cells(const char* name, size_t num_cells, size_t num_keys, int num_groups) {
    if (num_cells != num_keys * num_groups)
        throw std::invalid_argument(std::string(name) + ": it has " + std::to_string(num_cells) + " values for " +
                                    std::to_string(num_keys) + " keys of " + std::to_string(num_groups) + " groups");
}

void check_has_keys(int num_blocks, std::span<const BlockKey> keys) {
    if (num_blocks < 0 || num_blocks > std::ssize(keys))
        throw std::invalid_argument("num_blocks: the request has " + std::to_string(keys.size()) + " keys");
}

}  // namespace

void Scheduler::set_write_policy(WritePolicy policy) {
    const std::lock_guard lock(mutex_);
    cache_.set_write_policy(policy);
}

std::vector<StoredBlock> Scheduler::take_offers(int max_blocks) {
    const std::lock_guard lock(mutex_);
    if (is_step_copying()) return {};
    std::vector<StoredBlock> taken = cache_.take_offers(max_blocks);
    is_copying_ = !taken.empty();
    return taken;
}

void Scheduler::end_copying() {
    const std::lock_guard lock(mutex_);
    is_copying_ = false;
}

void Scheduler::offer_prefix(std::span<const BlockKey> keys) {
    const std::lock_guard lock(mutex_);
    cache_.offer_prefix(keys);
}

int Scheduler::num_offers() const {
    const std::lock_guard lock(mutex_);
    return cache_.offers().num_waiting();
}

int64_t Scheduler::num_dropped_offers() const {
    const std::lock_guard lock(mutex_);
    return cache_.offers().num_dropped_total();
}

void Scheduler::hold(RequestId id) {
    const std::lock_guard lock(mutex_);
    if (Request* request = roster_.find(id)) roster_.set_held(*request, true);
}

void Scheduler::let_go(RequestId id) {
    const std::lock_guard lock(mutex_);
    if (Request* request = roster_.find(id)) roster_.set_held(*request, false);
}

Scheduler::Lookup Scheduler::look_up(RequestId id) const {
    const std::lock_guard lock(mutex_);
    const Request* request = roster_.find(id);
    if (!request) return {};
    const std::span<const BlockKey> keys = matchable(*request, limits_.block_size);
    std::vector<uint8_t> is_resident = cache_.residency(keys);
    const int num_usable = cache_.usable_length(is_resident);
    return {{keys.begin(), keys.end()}, std::move(is_resident), num_usable};
}

std::optional<double> Scheduler::prefill_s(int begin, int end) const {
    const std::lock_guard lock(mutex_);
    if (begin < 0) throw std::invalid_argument("begin must not be negative");
    return policy_.prefill_s(begin, end, roster_.running());
}

std::optional<double> Scheduler::evicted_age_s(const BlockKey& key) const {
    const std::lock_guard lock(mutex_);
    return cache_.evicted_age_s(key);
}

int Scheduler::loadable(RequestId id, std::span<const uint8_t> is_stored, int max_blocks, PinnedChunks pinned) const {
    const std::lock_guard lock(mutex_);
    const Request* request = roster_.find(id);
    if (!request) return 0;
    const std::span<const BlockKey> keys = matchable(*request, limits_.block_size);
    check_has_cells("is_stored", is_stored.size(), keys.size(), cache_.num_groups());
    check_pinned(pinned, keys.size());
    const size_t num_blocks = std::min(cache_.local_room(keys, pinned), std::max(0, max_blocks));
    std::vector<uint8_t> is_there = cache_.residency(keys.first(num_blocks));
    for (size_t i = 0; i < is_there.size(); ++i) is_there[i] |= is_stored[i];
    return cache_.usable_length(is_there);
}

// Throws std::invalid_argument unless each pinned chunk can hold a block of its group.
void Scheduler::check_pinned(PinnedChunks pinned, size_t num_keys) const {
    if (pinned.empty()) return;
    check_has_cells("pinned", pinned.size(), num_keys, cache_.num_groups());
    for (size_t cell = 0; cell < pinned.size(); ++cell) {
        const GroupSpec& spec = cache_.spec(static_cast<int>(cell % cache_.num_groups()));
        const int num_chunks = std::max(spec.host.count, spec.source.count);
        if (pinned[cell] != kNone && (pinned[cell] < 0 || pinned[cell] >= num_chunks))
            throw std::invalid_argument("pinned: host memory has no chunk " + std::to_string(pinned[cell]) +
                                        " for this group");
    }
}

std::vector<LoadingBlock> Scheduler::begin_load(RequestId id, int num_blocks, int first, PinnedChunks pinned) {
    const std::lock_guard lock(mutex_);
    Request* request = roster_.find(id);
    if (!request) return {};
    const std::span<const BlockKey> keys = matchable(*request, limits_.block_size);
    check_has_keys(num_blocks, keys);
    check_pinned(pinned, keys.size());
    if (first < 0 || first > num_blocks) throw std::invalid_argument("first must be from 0 to num_blocks");
    if (is_step_copying()) return {};  // it still reads moved blocks from places that count as free already
    if (roster_.awaits_loads()) return {};
    const int num_to_compute = first - cache_.usable_length(cache_.residency(keys.first(first)));
    const Spare spare{policy_.spare_blocks(roster_.running()), num_to_compute};
    std::vector<LoadingBlock> loading =
        cache_.begin_load(keys.first(num_blocks), first, pinned, spare, prefixes_brought_before(*request));
    if (!loading.empty() && request->slot == kNone) {
        request->load_end = num_blocks;
        note_brought(*request);
    }
    cache_.describe_loading(loading, request->tokens, request->root_key, keys);
    return loading;
}

// Returns the prefixes that storage has loaded, or still loads, for requests of the same or a lower priority number
// that have not begun to use them: a load for this request may not evict them. Requests that could not run even if they
// were alone do not count.
std::vector<std::span<const BlockKey>> Scheduler::prefixes_brought_before(const Request& request) {
    const auto length_of = [](const Request* r) { return std::max(r->load_end, r->back_end); };
    std::erase_if(brought_, [&](const Request* r) { return length_of(r) == 0; });
    // Waiting requests come before running ones, each in the order of their container, so that equal loads find them in
    // the same order.
    const auto order_of = [](const Request* r) {
        const bool waits = r->slot == kNone;
        return std::tuple(!waits, r->priority, waits ? r->flow : 0, waits ? r->lane : 0, waits ? r->rank : 0,
                          r->arrival);
    };
    std::ranges::sort(brought_, {}, order_of);
    std::vector<std::span<const BlockKey>> prefixes;
    for (const Request* other : brought_)
        if (other != &request && other->priority <= request.priority && policy_.could_hold(*other))
            prefixes.push_back(std::span(other->keys).first(length_of(other)));
    return prefixes;
}

std::vector<int> Scheduler::take_unpinned() {
    const std::lock_guard lock(mutex_);
    return cache_.take_unpinned();
}

bool Scheduler::evict_host() {
    const std::lock_guard lock(mutex_);
    if (is_step_copying()) return false;
    cache_.evict_host();
    return true;
}

void Scheduler::note_brought(Request& r) {
    if (std::ranges::find(brought_, &r) == brought_.end()) brought_.push_back(&r);
}

void Scheduler::meet(RequestId id, int num_blocks) {
    const std::lock_guard lock(mutex_);
    Request* request = roster_.find(id);
    if (!request) return;
    check_has_keys(num_blocks, matchable(*request, limits_.block_size));
    roster_.set_held(*request, false);
    if (!can_meet() || !roster_.waiting().contains(*request)) return;
    request->back_end = num_blocks;
    note_brought(*request);
}

int Scheduler::num_planned_blocks(RequestId id) const {
    const std::lock_guard lock(mutex_);
    const Request* request = roster_.find(id);
    return request ? request->num_planned() / limits_.block_size : 0;
}

void Scheduler::enable_kv_events(int max_events) {
    const std::lock_guard lock(mutex_);
    if (max_events < 1) throw std::invalid_argument("max_events must be positive");
    cache_.events().enable(max_events);
}

KvEvents Scheduler::take_kv_events() {
    const std::lock_guard lock(mutex_);
    return cache_.events().take();
}

std::vector<ResidentBlock> Scheduler::resident_blocks() const {
    const std::lock_guard lock(mutex_);
    return cache_.resident_blocks();
}

void Scheduler::forget_loading(std::span<const LoadedBlock> blocks) {
    const std::lock_guard lock(mutex_);
    cache_.check_loading(blocks);
    cache_.forget_loading(blocks);
}

void Scheduler::end_load(std::span<const LoadedBlock> blocks, bool is_loaded) {
    const std::lock_guard lock(mutex_);
    cache_.check_loading(blocks);
    cache_.end_load(blocks, is_loaded);
    // With the tail of a window a prompt may match blocks that running requests use: then it needs fewer in groups
    // whose room has not changed.
    const auto is_of_window = [&](const LoadedBlock& b) { return cache_.spec(b.group).window > 0; };
    if (is_loaded && std::ranges::any_of(blocks, is_of_window)) refusal_.forget();
}

}  // namespace swiftkv
