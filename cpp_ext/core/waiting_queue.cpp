#include "waiting_queue.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <tuple>

#include "../common/check.h"

namespace swiftkv {

namespace {

constexpr int kMaxMoves = 64;  // in one call: all requests with a prefix may move when it is cached
constexpr int kBeforeAll = std::numeric_limits<int>::min(), kBehindAll = std::numeric_limits<int>::max();

}  // namespace

bool WaitingQueue::Earlier::operator()(const Request* a, const Request* b) const {
    return std::tie(a->rank, a->arrival) < std::tie(b->rank, b->arrival);
}

// Notes that a flow begins to wait, if none of its requests waits yet. It is compared with the waiting flows of its
// priority or, if there are none, with the flow that waited last.
void WaitingQueue::begin_waiting(const Request& r) {
    const auto own = lanes_.lower_bound({r.priority, r.flow, kBeforeAll, false});
    if (own != lanes_.end() && own->first.priority == r.priority && own->first.flow == r.flow) return;
    std::optional<int64_t> least;
    auto it = lanes_.lower_bound({r.priority, kBeforeAll, kBeforeAll, false});
    while (it != lanes_.end() && it->first.priority == r.priority) {
        const int flow = it->first.flow;
        least = std::min(least.value_or(shares_.counter(flow)), shares_.counter(flow));
        it = lanes_.upper_bound({r.priority, flow, kBehindAll, true});
    }
    shares_.begin_waiting(r.flow, least.value_or(shares_.counter(last_flow_)));
}

void WaitingQueue::add(Request& r) {
    if (shares_.is_shared()) begin_waiting(r);
    r.num_expected = 0;
    r.num_expected = num_known(r) * cache_.block_size();
    insert(r);
    ++size_;
}

void WaitingQueue::remove(Request& r) {
    erase(r);
    last_flow_ = r.flow;
    r.num_expected = 0;
    --size_;
}

void WaitingQueue::set_held(Request& r, bool is_held) {
    erase(r);
    r.is_held = is_held;
    insert(r);
}

void WaitingQueue::insert(Request& r) {
    r.lane = order_.lane(r);
    r.rank = order_.rank(r);
    lanes_[key_of(r)].insert(&r);
    if (const auto next = awaiting(r)) awaiting_.insert(*next);
}

void WaitingQueue::erase(Request& r) {
    const auto found = lanes_.find(key_of(r));
    ensure(found != lanes_.end() && found->second.erase(&r) == 1, "a request that stops waiting waited");
    if (found->second.empty()) lanes_.erase(found);
    if (const auto next = awaiting(r)) awaiting_.erase(*next);
}

bool WaitingQueue::contains(Request& r) const {
    const auto found = lanes_.find(key_of(r));
    return found != lanes_.end() && found->second.count(&r) > 0;
}

// Whether it matters how much of a request is cached.
bool WaitingQueue::is_looked_up(const Request& r) const {
    return order_.is_by_length() && !r.skip_prefix_match;
}

int WaitingQueue::num_known(const Request& r) const {
    if (!is_looked_up(r)) return 0;
    const int size = cache_.block_size();
    return cache_.count_known(std::span(r.keys).first(r.max_match_blocks(size)), r.num_expected / size);
}

std::optional<WaitingQueue::Awaiting> WaitingQueue::awaiting(Request& r) const {
    if (!is_looked_up(r)) return std::nullopt;
    const int size = cache_.block_size(), known = r.num_expected / size;
    if (known == r.max_match_blocks(size)) return std::nullopt;
    return Awaiting{r.keys[known], r.arrival, &r};
}

// Looks up again how much of a request is cached, and moves it if that has changed. Returns whether it has.
bool WaitingQueue::refresh(Request& r) {
    const int size = cache_.block_size(), known = num_known(r);
    if (known == r.num_expected / size) return false;
    erase(r);
    r.num_expected = known * size;
    insert(r);
    return true;
}

void WaitingQueue::note_cached(std::span<const BlockKey> keys) {
    if (awaiting_.empty()) return news_.clear();
    news_.insert(news_.end(), keys.begin(), keys.end());
    int num_moves = 0;
    for (; !news_.empty(); news_.pop_front()) {
        auto it = awaiting_.lower_bound({news_.front(), 0, nullptr});
        while (it != awaiting_.end() && it->key == news_.front()) {
            if (num_moves == kMaxMoves) return;
            Request& request = *(it++)->request;
            num_moves += refresh(request);
        }
    }
}

void WaitingQueue::refresh() {
    if (!order_.is_by_length() || lanes_.empty()) return;
    std::vector<Key> keys;
    const int64_t priority = first_priority();
    for (auto it = lanes_.begin(); it != lanes_.end() && it->first.priority == priority; ++it)
        if (!it->first.is_held) keys.push_back(it->first);
    int num_moves = 0;
    for (const Key& key : keys) {
        while (num_moves < kMaxMoves) {
            const auto lane = lanes_.find(key);
            if (lane == lanes_.end() || !refresh(**lane->second.begin())) break;
            ++num_moves;
        }
    }
}

// Returns the request after `r` in its lane; null: there is none.
Request* WaitingQueue::behind(Request& r) const {
    const Lane& lane = lanes_.at(key_of(r));
    const auto next = std::next(lane.find(&r));
    return next == lane.end() ? nullptr : *next;
}

std::vector<Request*> WaitingQueue::all() const {
    std::vector<Request*> requests;
    for (const auto& [key, lane] : lanes_) requests.insert(requests.end(), lane.begin(), lane.end());
    return requests;
}

// Returns whether there was one.
bool WaitingQueue::Cursor::open_next_priority() {
    auto it = queue_.lanes_.upper_bound({passed_priority_, kBehindAll, kBehindAll, true});
    if (it == queue_.lanes_.end()) return false;
    passed_priority_ = it->first.priority;
    for (; it != queue_.lanes_.end() && it->first.priority == passed_priority_; ++it) {
        const auto& [key, lane] = *it;
        if (key.is_held) continue;
        const Head head = head_of(**lane.begin());
        if (flows_.empty() || flows_.back().flow != key.flow) {
            flows_.push_back({key.flow, head, {}});
        } else {
            flows_.back().others.push_back(head);
        }
    }
    for (Lanes& lanes : flows_) lanes.bring_first_forward();
    return true;
}

WaitingQueue::Cursor::Head WaitingQueue::Cursor::head_of(Request& r) const {
    return {queue_.order_.urgency(r, moment_), r.num_left(), r.arrival, &r};
}

bool WaitingQueue::Cursor::Head::goes_before(const Head& other) const {
    if (urgency != other.urgency) return urgency > other.urgency;
    return std::tie(num_left, arrival) < std::tie(other.num_left, other.arrival);
}

void WaitingQueue::Cursor::Lanes::bring_first_forward() {
    for (Head& other : others)
        if (other.goes_before(first)) std::swap(first, other);
}

// Returns the flow of the next request. The flow that has had least is never past its share, so none that is goes next.
std::vector<WaitingQueue::Cursor::Lanes>::iterator WaitingQueue::Cursor::next_lanes() {
    const FairShare& shares = queue_.shares_;
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const Lanes& lanes : flows_) least = std::min(least, shares.counter(lanes.flow));
    auto next = flows_.end();
    for (auto it = flows_.begin(); it != flows_.end(); ++it) {
        if (shares.is_past_counter(it->flow, least)) continue;
        if (next == flows_.end() || it->first.goes_before(next->first)) next = it;
    }
    return next;
}

Request* WaitingQueue::Cursor::next() {
    while (flows_.empty()) {
        if (!open_next_priority()) return nullptr;
    }
    const auto lanes = next_lanes();
    Request* found = lanes->first.request;
    if (Request* next = queue_.behind(*found)) {
        lanes->first = head_of(*next);
    } else if (!lanes->others.empty()) {
        lanes->first = lanes->others.back();
        lanes->others.pop_back();
    } else {
        std::swap(*lanes, flows_.back());
        flows_.pop_back();
        return found;
    }
    lanes->bring_first_forward();
    return found;
}

void WaitingQueue::check() const {
    size_t count = 0, num_awaiting = 0;
    for (const auto& [key, lane] : lanes_) {
        check_that(!lane.empty(), "a lane has requests");
        for (Request* r : lane) {
            check_that(key == key_of(*r) && r->lane == order_.lane(*r) && r->rank == order_.rank(*r),
                       "a waiting request is in its lane");
            ++count;
            const auto next = awaiting(*r);
            num_awaiting += next.has_value();
            check_that(!next || awaiting_.contains(*next), "a waiting request is known by the key that it awaits");
        }
    }
    check_that(num_awaiting == awaiting_.size(), "only waiting requests await a key");
    check_that(count == size_, "waiting requests are counted");
}

}  // namespace swiftkv
