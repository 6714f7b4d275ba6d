#include "roster.h"

#include <algorithm>
#include <functional>

#include "../common/check.h"

namespace swiftkv {

Roster::Roster(KvCache& cache, Demand& demand, const AdmissionOrder& order, FairShare& shares, int max_num_seqs)
    : cache_(cache), demand_(demand), waiting_(cache, order, shares) {
    for (int slot = max_num_seqs - 1; slot >= 0; --slot) free_slots_.push_back(slot);
    std::make_heap(free_slots_.begin(), free_slots_.end(), std::greater<>());
}

Request* Roster::find(RequestId id) const {
    const auto found = requests_.find(id);
    return found == requests_.end() ? nullptr : found->second.get();
}

bool Roster::awaits_loads() const {
    return std::any_of(running_.begin(), running_.end(), [](const Request* r) { return r->awaits_loads; });
}

std::vector<BlockTable*> Roster::running_tables() const {
    std::vector<BlockTable*> tables;
    for (Request* r : running_) tables.push_back(&r->table);
    return tables;
}

void Roster::add(std::unique_ptr<Request> request) {
    request->arrival = num_arrived_++;
    request->table = cache_.make_table();
    Request& r = *requests_.emplace(request->id, std::move(request)).first->second;
    enqueue(r);
    demand_.note_length(r);
}

void Roster::set_held(Request& r, bool is_held) {
    if (r.slot == kNone) {
        waiting_.set_held(r, is_held);
    } else {
        r.is_held = is_held;
    }
}

void Roster::erase(Request& r) {
    std::erase(preempted_, r.id);
    if (r.slot == kNone) {
        dequeue(r);
    } else {
        stop(r);
    }
    requests_.erase(r.id);
}

void Roster::start(Request& r) {
    dequeue(r);
    ensure(!free_slots_.empty(), "there is a row slot for a request that is admitted");
    std::pop_heap(free_slots_.begin(), free_slots_.end(), std::greater<>());
    r.slot = free_slots_.back();
    free_slots_.pop_back();
    r.begun = num_begun_++;
    r.load_end = 0;
    running_.insert(std::lower_bound(running_.begin(), running_.end(), &r, Policy::Order{}), &r);
}

void Roster::preempt(Request& r) {
    stop(r);
    r.num_computed = r.back_end = 0;
    enqueue(r);
    preempted_.push_back(r.id);
    ++num_preemptions_total_;
}

void Roster::displace(Request& r) {
    preempt(r);
    r.displaced_len = r.num_known();
    ++num_displaced_total_[class_of(r.priority)];
}

void Roster::enqueue(Request& r) noexcept {
    waiting_.add(r);
    demand_.add_waiting(r);
}

void Roster::dequeue(Request& r) {
    waiting_.remove(r);
    r.stuck_since_s = r.refused_since_s = std::nullopt;
    demand_.remove_waiting(r);
}

void Roster::stop(Request& r) {
    if (cache_.has_windows()) cache_.keep_boundary(r.keys, r.table.num_committed, Worth::kKept);
    if (r.num_scheduled > 0) {
        cache_.retire(r.table);
    } else {
        cache_.release(r.table);
    }
    r.num_scheduled = r.num_unknown = 0;
    r.awaits_loads = false;
    free_slots_.push_back(r.slot);
    std::push_heap(free_slots_.begin(), free_slots_.end(), std::greater<>());
    r.slot = kNone;
    const auto found = std::lower_bound(running_.begin(), running_.end(), &r, Policy::Order{});
    ensure(found != running_.end() && *found == &r, "a request that stops running ran");
    running_.erase(found);
}

void Roster::check(int max_num_seqs) const {
    std::vector<int> slots = free_slots_;
    for (Request* r : running_) {
        check_that(!waiting_.contains(*r), "a request runs or waits, not both");
        slots.push_back(r->slot);
    }
    waiting_.check();
    for (const Request* r : waiting_.all()) {
        check_that(r->num_computed == 0 && r->slot == kNone, "a waiting request has computed nothing");
        for (const auto& group : r->table.groups) check_that(group.entries.empty(), "a waiting request holds no block");
    }
    std::sort(slots.begin(), slots.end());
    for (int i = 0; i < static_cast<int>(slots.size()); ++i) check_that(slots[i] == i, "every row slot has one owner");
    check_that(static_cast<int>(slots.size()) == max_num_seqs, "every row slot is accounted for");
    check_that(std::is_sorted(running_.begin(), running_.end(), Policy::Order{}), "running requests are in order");
    check_that(running_.size() + waiting_.size() == requests_.size(), "every request runs or waits");
}

}  // namespace swiftkv
