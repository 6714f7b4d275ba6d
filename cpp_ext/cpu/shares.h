#pragma once

#include <atomic>
#include <cstdint>

// The accounts by which the engines of a node share its cores, in a table that all of them map. Each engine writes its
// own account only, so one that dies in the middle leaves nothing half done. Nothing here waits or reads a clock.
//
// While several engines want the cores, each is due a part of them by weight, and computes on as many as that is,
// rounded up, so that on two cores two equal engines have one each and neither waits. Where the parts are no whole
// cores, clocks decide: each engine pays for core time, divided by its weight, on a virtual clock of its own
// (start-time fair queueing), and those whose clocks are behind choose first. Who finds no core left computes on one
// beside the others, and stands still only while it is ahead of its part.
namespace swiftkv {

struct Share {
    int32_t threads;   // cores that the engine computes on if it may have them
    double weight;     // above 0
    double max_share;  // of all cores, above 0 and up to 1
    bool is_whole;     // it computes on all of its cores at once or on none
};

// An engine may compute on so many cores now; if that is 0, it asks again after a time, unless others wake it before.
struct Permit {
    int32_t cores;
    int64_t wait_ns;
};

constexpr int kMaxAccounts = 63;
constexpr int64_t kTurnNs = 10'000'000;  // an engine that computes goes on for so long after others are due its core
constexpr int64_t kLeadNs =
    3 * kTurnNs;  // an engine on a core that is not due to it may be so far ahead, and others so far behind
constexpr int64_t kCreditNs = 4 * kTurnNs;  // of the whole machine: the most that an engine saves up while it rests
constexpr int64_t kAbsentNs = 100'000'000;  // an engine that was not seen for so long holds nobody up
constexpr int64_t kForgottenNs = 10'000'000'000;   // and need not be looked at any more
constexpr int64_t kAskAgainNs = kTurnNs / 4;       // an engine that waits asks so often
constexpr int64_t kLongestWaitNs = 1'000'000'000;  // then it computes for a turn whatever its account says
// An engine that computes asks at these intervals whether it may go on: the first where others compute, too, or its
// share has a cap, the second where it is alone.
constexpr int64_t kAskContendedNs = 1'000'000;
constexpr int64_t kAskAloneNs = 4'000'000;

struct alignas(128) Account {
    std::atomic<double> clock_ns;  // core time over weight
    std::atomic<int64_t> seen_ns;  // CLOCK_MONOTONIC
    std::atomic<double> weight;
    std::atomic<int32_t> threads;
    std::atomic<int32_t> cores;  // that it computes on
    std::atomic<uint32_t> is_whole;
    std::atomic<uint32_t> wake;  // a futex: changes when others stop computing
};

// All zeros: nobody is there.
struct ShareTable {
    alignas(64) std::atomic<uint64_t> wanting;  // a bit for each account whose engine wants cores
    alignas(64) std::atomic<double> clock_ns;  // never goes back: that of the engine furthest behind of those that want
    Account accounts[kMaxAccounts];
};
static_assert(sizeof(ShareTable) == 8192);
static_assert(std::atomic<double>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

// One engine's account.
class ShareAccount {
  public:
    // Begins anew, whatever another process left there. Throws std::invalid_argument for a share that makes no sense.
    ShareAccount(ShareTable& table, int slot, const Share& share, int num_cores);

    void begin(int64_t now_ns);  // it wants cores
    void end();                  // and wants none any more
    void charge(int64_t core_ns);

    Permit ask(int64_t now_ns);  // while it wants cores

    // Lets the engine compute for a turn: it has waited too long. Returns the cores.
    int32_t forgive();

    // Whether the answer may be another one than a moment ago.
    bool is_contended() const { return is_capped_ || (table_.wanting.load(std::memory_order_relaxed) & ~bit_) != 0; }

    std::atomic<uint32_t>& wake() { return account().wake; }

    // Calls visit(futex) for the others that want cores and have none.
    template <typename Visit>
    void for_each_waiting(Visit visit) {
        for_each_wanting([&](int, Account& other) {
            if (other.cores == 0) visit(other.wake);
        });
    }

    double clock_ns() const { return table_.accounts[slot_].clock_ns; }

  private:
    Account& account() { return table_.accounts[slot_]; }

    template <typename Visit>
    void for_each_wanting(Visit visit) {
        for (uint64_t left = table_.wanting & ~bit_; left != 0; left &= left - 1) {
            const int slot = __builtin_ctzll(left);
            visit(slot, table_.accounts[slot]);
        }
    }

    bool is_there(int slot, const Account& other, int64_t now_ns);
    int64_t until_allowed(int64_t now_ns);
    void want();
    void advance_table_clock();
    void stay_near_table_clock();
    int32_t choose_cores(int64_t now_ns);

    ShareTable& table_;
    int slot_;
    uint64_t bit_;
    double weight_;
    int num_cores_;
    double credit_ns_;  // on its clock
    double cap_;        // cores
    bool is_capped_;
    double allowance_ns_ = 0;  // core time that max_share leaves it at the moment; below 0 it waits
    int64_t allowed_at_ns_ = 0;
    int64_t now_ns_ = 0;     // of the last question
    bool is_alone_ = false;  // when it last asked
};

}  // namespace swiftkv
