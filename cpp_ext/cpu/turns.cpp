#include "turns.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>
#include <system_error>

namespace swiftkv {
namespace {

constexpr int64_t kNsPerS = 1'000'000'000;

int64_t read_clock_ns(clockid_t clock) {
    timespec now{};
    clock_gettime(clock, &now);
    return now.tv_sec * kNsPerS + now.tv_nsec;
}

int64_t monotonic_ns() {
    return read_clock_ns(CLOCK_MONOTONIC);
}

ShareTable* map_table(int fd) {
    void* memory = mmap(nullptr, sizeof(ShareTable), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "the table of shares");
    return static_cast<ShareTable*>(memory);
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, int64_t at_most_ns) {
    const timespec timeout{at_most_ns / kNsPerS, at_most_ns % kNsPerS};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
    word.fetch_add(1);
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Waits until the account has cores, at most kLongestWaitNs from `began_ns` on.
Permit wait_for_permit(ShareAccount& account, int64_t began_ns) {
    while (true) {
        const uint32_t seen = account.wake();  // before ask(): an engine that stops computing later changes this
        const int64_t now_ns = monotonic_ns();
        Permit permit = account.ask(now_ns);
        if (permit.cores == 0 && now_ns - began_ns >= kLongestWaitNs) permit.cores = account.forgive();
        if (permit.cores > 0) return permit;
        futex_wait(account.wake(), seen, permit.wait_ns);
    }
}

}  // namespace

std::atomic<Turns*> Turns::in_use_{nullptr};
std::atomic<int32_t> Turns::threads_{kAll};

Turns::Turns(int fd, int account, int32_t threads, double weight, double max_share, int num_cores, int num_ranks)
    : table_(map_table(fd)),
      account_(*table_, account, {threads * num_ranks, weight, max_share, num_ranks > 1}, num_cores),
      num_threads_(threads),
      cores_(threads),
      num_ranks_(num_ranks),
      charged_ns_(read_clock_ns(CLOCK_PROCESS_CPUTIME_ID)) {}

Turns::~Turns() {
    Turns* mine = this;
    in_use_.compare_exchange_strong(mine, nullptr);
    if (is_in_step_) end();
    munmap(table_, sizeof(ShareTable));
}

void Turns::begin() {
    account_.begin(monotonic_ns());
    ask_again_ns_ = 0;
    is_in_step_ = true;
}

void Turns::end() {
    is_in_step_ = false;
    charge();
    account_.end();
    wake_others();
    let_go_on(kAll);
}

void Turns::check() {
    if (!is_in_step_) return;
    const int64_t now_ns = monotonic_ns();
    if (now_ns < ask_again_ns_) return;
    charge();
    Permit permit = account_.ask(now_ns);
    if (permit.cores == 0) permit = wait_for_turn(now_ns);
    if (permit.cores < cores_) wake_others();  // one of them may have the rest
    cores_ = permit.cores;
    let_go_on(has_all_cores() ? kAll : permit.cores);
    ask_again_ns_ = now_ns + (account_.is_contended() ? kAskContendedNs : kAskAloneNs);
}

void Turns::charge() {
    const int64_t used_ns = read_clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    const int64_t core_ns = (used_ns - charged_ns_) * num_ranks_;
    charged_ns_ = used_ns;
    core_ns_ += core_ns;
    account_.charge(core_ns);
}

Permit Turns::wait_for_turn(int64_t began_ns) {
    let_go_on(0);
    wake_others();  // it may be the turn of one of them now
    const Permit permit = wait_for_permit(account_, began_ns);
    waited_ns_ += monotonic_ns() - began_ns;
    return permit;
}

void Turns::let_go_on(int32_t threads) {
    if (threads_.exchange(threads) < threads) threads_.notify_all();
}

void Turns::wake_others() {
    account_.for_each_waiting(futex_wake);
}

DeviceTurns::DeviceTurns(int fd, int account, double weight, double max_share)
    : table_(map_table(fd)), account_(*table_, account, {1, weight, max_share, true, kLongestWaitNs}, 1) {}

DeviceTurns::~DeviceTurns() {
    rest();
    munmap(table_, sizeof(ShareTable));
}

void DeviceTurns::wait() {
    const int64_t began_ns = monotonic_ns();
    account_.begin(began_ns);
    if (account_.ask(began_ns).cores == 0) {
        account_.for_each_waiting(futex_wake);  // it may be the turn of one of them now
        wait_for_permit(account_, began_ns);
        waited_ns_ += monotonic_ns() - began_ns;
    }
    account_.stay(monotonic_ns() + kLongestWaitNs);  // nothing asks while a step is computed
}

void DeviceTurns::charge(int64_t device_ns) {
    device_ns_ += device_ns;
    account_.charge(device_ns);
}

void DeviceTurns::rest() {
    account_.end();
    account_.for_each_waiting(futex_wake);
}

}  // namespace swiftkv
