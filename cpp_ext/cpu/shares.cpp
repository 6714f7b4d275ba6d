#include "shares.h"

#include <algorithm>
#include <stdexcept>

namespace swiftkv {
namespace {

constexpr double kCapBurstNs = 0.1e9;  // max_share holds over times longer than this

int checked_slot(int slot) {
    if (slot < 0 || slot >= kMaxAccounts) throw std::invalid_argument("slot must be from 0 to 62");
    return slot;
}

}  // namespace

ShareAccount::ShareAccount(ShareTable& table, int slot, const Share& share, int num_cores)
    : table_(table),
      slot_(checked_slot(slot)),
      bit_(uint64_t{1} << slot_),
      weight_(share.weight),
      num_cores_(num_cores),
      credit_ns_(static_cast<double>(kCreditNs) * num_cores / share.weight),
      cap_(share.max_share * num_cores),
      is_capped_(share.max_share < 1) {
    if (share.threads < 1 || num_cores < 1) throw std::invalid_argument("threads and num_cores must be at least 1");
    if (!(share.weight > 0)) throw std::invalid_argument("weight must be above 0");
    if (!(share.max_share > 0 && share.max_share <= 1))
        throw std::invalid_argument("max_share must be above 0 and at most 1");
    table_.wanting.fetch_and(~bit_);
    Account& mine = account();
    mine.is_computing = 0;
    mine.threads = share.threads;
    mine.turn_ns = static_cast<double>(kTurnNs) * std::min(share.threads, num_cores) / share.weight;
    mine.clock_ns = table_.clock_ns.load();
}

void ShareAccount::begin(int64_t now_ns) {
    account().seen_ns = now_ns;
    now_ns_ = now_ns;
    is_alone_ = false;
    stay_near_table_clock();
    want();
}

void ShareAccount::end() {
    account().is_computing = 0;
    table_.wanting.fetch_and(~bit_);
}

void ShareAccount::charge(int64_t core_ns) {
    allowance_ns_ -= static_cast<double>(core_ns);
    Account& mine = account();
    mine.clock_ns = mine.clock_ns + static_cast<double>(core_ns) / weight_;
    advance_table_clock();
}

int64_t ShareAccount::ask(int64_t now_ns) {
    account().seen_ns = now_ns;
    now_ns_ = now_ns;
    if (const int64_t wait_ns = until_allowed(now_ns)) {
        end();
        return std::min(wait_ns, kAskAgainNs);
    }
    stay_near_table_clock();
    want();
    const bool may_compute = is_due(now_ns);
    account().is_computing = may_compute;
    return may_compute ? 0 : kAskAgainNs;
}

void ShareAccount::forgive() {
    double least = clock_ns();
    for_each_wanting([&](int slot, const Account& other) {
        if (is_there(slot, other, now_ns_)) least = std::min(least, other.clock_ns - other.turn_ns);
    });
    account().clock_ns = least - 1;
    want();
    account().is_computing = 1;
}

// Whether those that are behind leave a core. They are compared by their clocks; one that computes counts as if its
// turn were still to come, so that nobody is interrupted before it.
bool ShareAccount::is_due(int64_t now_ns) {
    const auto rank = [](const Account& of) { return of.clock_ns - (of.is_computing ? of.turn_ns.load() : 0); };
    const double my_rank = rank(account());
    int taken = 0;
    is_alone_ = true;
    for_each_wanting([&](int slot, const Account& other) {
        if (!is_there(slot, other, now_ns)) return;
        is_alone_ = false;
        const double its_rank = rank(other);
        if (its_rank < my_rank || (its_rank == my_rank && slot < slot_)) taken += other.threads;
    });
    return taken < num_cores_;
}

bool ShareAccount::is_there(int slot, const Account& other, int64_t now_ns) {
    const int64_t unseen_ns = now_ns - other.seen_ns;
    if (unseen_ns > kForgottenNs) table_.wanting.fetch_and(~(uint64_t{1} << slot));
    return unseen_ns <= kAbsentNs;
}

int64_t ShareAccount::until_allowed(int64_t now_ns) {
    if (!is_capped_) return 0;
    const double most = cap_ * kCapBurstNs;
    const double least = -cap_ * static_cast<double>(kLongestWaitNs);
    const auto passed_ns = static_cast<double>(now_ns - allowed_at_ns_);
    allowed_at_ns_ = now_ns;
    allowance_ns_ = std::clamp(allowance_ns_ + passed_ns * cap_, least, most);
    return allowance_ns_ >= 0 ? 0 : 1 + static_cast<int64_t>(-allowance_ns_ / cap_);
}

void ShareAccount::want() {
    if ((table_.wanting & bit_) == 0) table_.wanting.fetch_or(bit_);
}

// The time in which nobody else wanted cores is nobody's debt: the table's clock goes with the only one that computed.
void ShareAccount::advance_table_clock() {
    double least = clock_ns();
    if (!is_alone_)
        for_each_wanting([&](int slot, const Account& other) {
            if (is_there(slot, other, now_ns_)) least = std::min(least, other.clock_ns.load());
        });
    double seen = table_.clock_ns;
    while (seen < least && !table_.clock_ns.compare_exchange_weak(seen, least)) {
    }
}

// An engine that rests saves up a bounded credit, and one that computes on cores which nobody else wanted gets a
// bounded debt. One that computes may owe two turns more: else its turn would not end beside others with as large a
// debt.
void ShareAccount::stay_near_table_clock() {
    Account& mine = account();
    const double now = table_.clock_ns;
    const double most = now + credit_ns_ + (mine.is_computing ? 2 * mine.turn_ns : 0.0);
    mine.clock_ns = std::clamp(clock_ns(), now - credit_ns_, most);
}

}  // namespace swiftkv
