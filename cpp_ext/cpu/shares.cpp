#include "shares.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <stdexcept>

namespace swiftkv {
namespace {

constexpr double kCapBurstNs = 0.1e9;  // max_share holds over times longer than this
constexpr double kRounding = 1e-9;     // cores: rounding may make a part so much more than a whole number

// The length of a turn on the engine's clock.
double turn_ns(const Account& of) {
    return static_cast<double>(kTurnNs) * of.cores / of.weight;
}

// The order in which engines choose, the lowest first. An engine that computes counts as if its turn were still to
// come, so that it is not interrupted before the turn ends.
double rank(const Account& of) {
    return of.clock_ns - turn_ns(of);
}

// An engine that wants cores.
struct Claim {
    double rank;
    double clock_ns;
    double weight;
    int number;
    int32_t threads;
    bool is_whole;
    bool is_met = false;  // it is due as many cores as it has threads
    int32_t cores = 0;    // that it gets

    bool operator<(const Claim& other) const { return rank != other.rank ? rank < other.rank : number < other.number; }
};

// Divides cores by weight, but gives no engine more than it has threads. Returns the part that is due to a weight of 1.
double divide(double cores, std::span<Claim> claims) {
    double weight = 0;
    for (const Claim& claim : claims) weight += claim.weight;
    for (bool again = true; again;) {
        again = false;
        for (Claim& claim : claims) {
            if (claim.is_met || cores * claim.weight < claim.threads * weight) continue;
            claim.is_met = again = true;
            cores -= claim.threads;
            weight -= claim.weight;
        }
    }
    return weight > 0 ? cores / weight : 0;
}

// Gives each engine the cores that are due to it by weight, rounded up, as long as there are cores. Engines that are
// behind choose first. Cores that are left go to engines that can use them, at last to one that needs more than are
// left. An engine that got none still gets one, unless it is far ahead; the operating system then divides the cores
// between them. So with equal weights no engine stands still.
void give_cores(int32_t num_cores, std::span<Claim> claims) {
    const double for_weight_1 = divide(num_cores, claims);
    std::sort(claims.begin(), claims.end());
    int32_t left = num_cores;
    const auto take = [&](Claim& claim, int32_t cores) {
        claim.cores += cores;
        left = std::max(left - cores, 0);
    };
    for (Claim& claim : claims) {
        const auto due = static_cast<int32_t>(std::ceil(for_weight_1 * claim.weight - kRounding));
        if (!claim.is_whole)
            take(claim, std::min(left, claim.is_met ? claim.threads : due));
        else if (left == num_cores || claim.threads <= left)
            take(claim, claim.threads);
    }
    for (Claim& claim : claims)
        if (!claim.is_whole) take(claim, std::min(left, claim.threads - claim.cores));
    for (Claim& claim : claims)
        if (claim.cores == 0 && left > 0) take(claim, claim.threads);
    const Claim last = std::ranges::min(claims, {}, &Claim::clock_ns);
    for (Claim& claim : claims) {
        const double lead_ns = static_cast<double>(kLeadNs) / std::max(claim.weight, last.weight);
        if (claim.cores == 0 && !claim.is_whole && claim.clock_ns <= last.clock_ns + lead_ns) take(claim, 1);
    }
}

int checked_number(int number) {
    if (number < 0 || number >= kMaxAccounts) throw std::invalid_argument("account must be from 0 to 62");
    return number;
}

}  // namespace

ShareAccount::ShareAccount(ShareTable& table, int number, const Share& share, int num_cores)
    : table_(table),
      number_(checked_number(number)),
      bit_(uint64_t{1} << number_),
      weight_(share.weight),
      num_cores_(num_cores),
      credit_ns_(static_cast<double>(kCreditNs) * num_cores / share.weight),
      debt_ns_(static_cast<double>(std::max(kCreditNs, share.unasked_ns)) * num_cores / share.weight),
      cap_(share.max_share * num_cores),
      is_capped_(share.max_share < 1) {
    if (share.threads < 1 || num_cores < 1) throw std::invalid_argument("threads and num_cores must be at least 1");
    if (!(share.weight > 0)) throw std::invalid_argument("weight must be above 0");
    if (!(share.max_share > 0 && share.max_share <= 1))
        throw std::invalid_argument("max_share must be above 0 and at most 1");
    table_.wanting.fetch_and(~bit_);
    Account& mine = account();
    mine.cores = 0;
    mine.weight = share.weight;
    mine.threads = share.is_whole ? share.threads : std::min(share.threads, static_cast<int>(std::ceil(cap_)));
    mine.is_whole = share.is_whole;
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
    account().cores = 0;
    table_.wanting.fetch_and(~bit_);
}

void ShareAccount::charge(int64_t core_ns) {
    allowance_ns_ -= static_cast<double>(core_ns);
    Account& mine = account();
    mine.clock_ns = mine.clock_ns + static_cast<double>(core_ns) / weight_;
    advance_table_clock();
}

Permit ShareAccount::ask(int64_t now_ns) {
    account().seen_ns = now_ns;
    now_ns_ = now_ns;
    if (const int64_t wait_ns = until_allowed(now_ns)) {
        end();
        return {0, std::min(wait_ns, kAskAgainNs)};
    }
    stay_near_table_clock();
    want();
    const int32_t cores = choose_cores(now_ns);
    account().cores = cores;
    return {cores, cores == 0 ? kAskAgainNs : 0};
}

int32_t ShareAccount::forgive() {
    double least = clock_ns();
    for_each_wanting([&](int number, const Account& other) {
        if (is_there(number, other, now_ns_)) least = std::min(least, rank(other));
    });
    account().clock_ns = least - 1;
    want();
    return account().cores = choose_cores(now_ns_);
}

int32_t ShareAccount::choose_cores(int64_t now_ns) {
    Claim claims[kMaxAccounts];
    size_t count = 0;
    const auto add = [&](int number, const Account& of) {
        claims[count++] = {rank(of), of.clock_ns, of.weight, number, of.threads, of.is_whole != 0};
    };
    add(number_, account());
    for_each_wanting([&](int number, const Account& other) {
        if (is_there(number, other, now_ns)) add(number, other);
    });
    is_alone_ = count == 1;
    const std::span all(claims, count);
    give_cores(num_cores_, all);
    return std::find_if(all.begin(), all.end(), [&](const Claim& claim) { return claim.number == number_; })->cores;
}

bool ShareAccount::is_there(int number, const Account& other, int64_t now_ns) {
    const int64_t unseen_ns = now_ns - other.seen_ns;
    if (unseen_ns > kForgottenNs) table_.wanting.fetch_and(~(uint64_t{1} << number));
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

// Advances the table's clock to the engine furthest behind. While only one engine wants cores, the table's clock moves
// with that engine, which so gets no debt.
void ShareAccount::advance_table_clock() {
    double least = clock_ns();
    if (!is_alone_)
        for_each_wanting([&](int number, const Account& other) {
            if (is_there(number, other, now_ns_)) least = std::min(least, other.clock_ns.load());
        });
    double seen = table_.clock_ns;
    while (seen < least && !table_.clock_ns.compare_exchange_weak(seen, least)) {
    }
}

// Bounds the credit that an engine saves up while it rests, and the debt that it gets on cores which no other engine
// wanted. An engine that computes may owe two turns more: else its turn would not end beside others with as large a
// debt.
void ShareAccount::stay_near_table_clock() {
    Account& mine = account();
    const double now = table_.clock_ns;
    const double most = now + debt_ns_ + 2 * turn_ns(mine);
    mine.clock_ns = std::clamp(clock_ns(), now - credit_ns_, most);
}

}  // namespace swiftkv
