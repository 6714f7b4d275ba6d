#pragma once

#include <atomic>
#include <cstdint>

// The accounts by which the engines of a node share its cores, in a table that all of them map. Each engine writes only
// its own account, so one that dies leaves nothing half done. Nothing here waits or reads a clock.
//
// While several engines want the cores, each is due a part of them by weight, rounded up to whole cores: on two cores,
// two equal engines have one each, and neither waits. If the parts are not whole cores, clocks decide. Each engine has
// a virtual clock, which its core time divided by its weight advances (start-time fair queueing), and engines whose
// clocks are behind choose first. An engine that finds no core left shares one with the others, and waits only while it
// is too far ahead of its part.
//
// A table may also be that of one GPU, which counts as one core, with engines that are `is_whole`.
namespace swiftkv {

struct Share {
    int32_t threads;         // the most cores that the engine can use
    double weight;           // above 0
    double max_share;        // of all cores, above 0 and up to 1
    bool is_whole;           // the engine computes on all of its cores at once or on none
    int64_t unasked_ns = 0;  // the longest time for which it computes before it asks again, as on a GPU
};

// The number of cores on which an engine may compute now. If it is 0, the engine asks again after `wait_ns`, or when
// another engine wakes it.
struct Permit {
    int32_t cores;
    int64_t wait_ns;
};

constexpr int kMaxAccounts = 63;
constexpr int64_t kTurnNs = 10'000'000;  // how long an engine goes on computing on a core that is due to another
constexpr int64_t kLeadNs =
    3 * kTurnNs;  // how far ahead of the engine furthest behind one may be that computes on a core not due to it
constexpr int64_t kCreditNs = 4 * kTurnNs;        // the most that an idle engine saves up, in time of the whole machine
constexpr int64_t kAbsentNs = 100'000'000;        // an engine that was not seen for this long no longer counts
constexpr int64_t kForgottenNs = 10'000'000'000;  // after this long it is struck off the list of those that want cores
constexpr int64_t kAskAgainNs = kTurnNs / 4;      // the interval at which an engine that waits asks
constexpr int64_t kLongestWaitNs = 1'000'000'000;  // after this wait it computes for a turn, whatever its account says
// The intervals at which an engine that computes asks whether it may go on: the first while other engines want cores or
// its share has a cap, the second while it is alone.
constexpr int64_t kAskContendedNs = 1'000'000;
constexpr int64_t kAskAloneNs = 4'000'000;

struct alignas(128) Account {
    std::atomic<double> clock_ns;  // core time over weight
    std::atomic<int64_t> seen_ns;  // CLOCK_MONOTONIC
    std::atomic<double> weight;
    std::atomic<int32_t> threads;
    std::atomic<int32_t> cores;  // on which the engine computes
    std::atomic<uint32_t> is_whole;
    std::atomic<uint32_t> wake;  // a futex: changes when others stop computing
};

// The table that all engines map. All zeros: there are no engines.
struct ShareTable {
    alignas(64) std::atomic<uint64_t> wanting;  // a bit for each account whose engine wants cores
    alignas(64) std::atomic<double> clock_ns;   // of the engine furthest behind among these; never goes back
    Account accounts[kMaxAccounts];
};
static_assert(sizeof(ShareTable) == 8192);
static_assert(std::atomic<double>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

// One engine's account.
class ShareAccount {
  public:
    // Resets whatever another process left in the account. Throws std::invalid_argument for an impossible share.
    ShareAccount(ShareTable& table, int number, const Share& share, int num_cores);

    void begin(int64_t now_ns);  // the engine wants cores from now on
    void end();                  // the engine no longer wants cores
    void charge(int64_t core_ns);

    Permit ask(int64_t now_ns);  // between begin() and end()

    // Counts the engine as there until kAbsentNs after `until_ns`, though it does not ask.
    void stay(int64_t until_ns) { account().seen_ns = until_ns; }

    // Lets the engine, which has waited too long, compute for a turn. Returns the number of cores.
    int32_t forgive();

    // Whether ask() may soon answer differently.
    bool is_contended() const { return is_capped_ || (table_.wanting.load(std::memory_order_relaxed) & ~bit_) != 0; }

    std::atomic<uint32_t>& wake() { return account().wake; }

    // Calls visit(futex) for the others that want cores and have none.
    template <typename Visit>
    void for_each_waiting(Visit visit) {
        for_each_wanting([&](int, Account& other) {
            if (other.cores == 0) visit(other.wake);
        });
    }

    double clock_ns() const { return table_.accounts[number_].clock_ns; }

  private:
    Account& account() { return table_.accounts[number_]; }

    template <typename Visit>
    void for_each_wanting(Visit visit) {
        for (uint64_t left = table_.wanting & ~bit_; left != 0; left &= left - 1) {
            const int number = __builtin_ctzll(left);
            visit(number, table_.accounts[number]);
        }
    }

    bool is_there(int number, const Account& other, int64_t now_ns);
    int64_t until_allowed(int64_t now_ns);
    void want();
    void advance_table_clock();
    void stay_near_table_clock();
    int32_t choose_cores(int64_t now_ns);

    ShareTable& table_;
    int number_;
    uint64_t bit_;
    double weight_;
    int num_cores_;
    double credit_ns_, debt_ns_;  // the most of either, on the engine's clock
    double cap_;                  // cores
    bool is_capped_;
    double allowance_ns_ = 0;  // core time that max_share leaves at the moment; below 0 the engine waits
    int64_t allowed_at_ns_ = 0;
    int64_t now_ns_ = 0;     // the time of the last ask()
    bool is_alone_ = false;  // whether it was alone at the last ask()
};

}  // namespace swiftkv
