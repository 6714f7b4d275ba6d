#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <memory>
#include <stdexcept>

#include "turns.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace swiftkv {
namespace {

// Accounts in private memory, at times that the caller gives.
class Shares {
  public:
    explicit Shares(int num_cores) : num_cores_(num_cores), table_(std::make_unique<ShareTable>()) {}

    void open(int account, int threads, double weight, double max_share, bool is_whole, int64_t unasked_ns) {
        const Share share{threads, weight, max_share, is_whole, unasked_ns};
        auto opened = std::make_unique<ShareAccount>(*table_, account, share, num_cores_);
        accounts_[account] = std::move(opened);
    }

    ShareAccount& at(int account) {
        if (account < 0 || account >= kMaxAccounts || accounts_[account] == nullptr)
            throw std::out_of_range("no such account");
        return *accounts_[account];
    }

  private:
    int num_cores_;
    std::unique_ptr<ShareTable> table_;
    std::unique_ptr<ShareAccount> accounts_[kMaxAccounts];
};

}  // namespace

void bind_turns(nb::module_& m) {
    m.attr("SHARE_TABLE_BYTES") = sizeof(ShareTable);
    m.attr("SHARE_ACCOUNTS") = kMaxAccounts;
    m.attr("TURN_NS") = kTurnNs;
    m.attr("LEAD_NS") = kLeadNs;
    m.attr("CREDIT_NS") = kCreditNs;
    m.attr("ABSENT_NS") = kAbsentNs;
    m.attr("ASK_CONTENDED_NS") = kAskContendedNs;
    m.attr("ASK_ALONE_NS") = kAskAloneNs;
    m.attr("LONGEST_WAIT_NS") = kLongestWaitNs;
    nb::class_<Shares>(m, "Shares")
        .def(nb::init<int>(), "num_cores"_a)
        .def("open", &Shares::open, "account"_a, "threads"_a, "weight"_a, "max_share"_a, "is_whole"_a = false,
             "unasked_ns"_a = 0)
        .def(
            "begin", [](Shares& self, int account, int64_t now_ns) { self.at(account).begin(now_ns); }, "account"_a,
            "now_ns"_a)
        .def(
            "end", [](Shares& self, int account) { self.at(account).end(); }, "account"_a)
        .def(
            "charge", [](Shares& self, int account, int64_t core_ns) { self.at(account).charge(core_ns); }, "account"_a,
            "core_ns"_a)
        .def(
            "ask",
            [](Shares& self, int account, int64_t now_ns) {
                const Permit permit = self.at(account).ask(now_ns);
                return std::pair(permit.cores, permit.wait_ns);
            },
            "account"_a, "now_ns"_a)
        .def(
            "forgive", [](Shares& self, int account) { return self.at(account).forgive(); }, "account"_a)
        .def("clock_ns", [](Shares& self, int account) { return self.at(account).clock_ns(); }, "account"_a);
    nb::class_<Turns>(m, "Turns")
        .def(
            "__init__",
            [](Turns* self, int fd, int account, int threads, double weight, double max_share, int num_cores,
               int num_ranks) {
                new (self) Turns(fd, account, threads, weight, max_share, num_cores, num_ranks);
                Turns::use(self);
            },
            "fd"_a, "account"_a, "threads"_a, "weight"_a, "max_share"_a, "num_cores"_a, "num_ranks"_a)
        .def("begin", &Turns::begin)
        .def("end", &Turns::end)
        .def("check", &Turns::check, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("core_s", &Turns::core_s)
        .def_prop_ro("waited_s", &Turns::waited_s);
    nb::class_<DeviceTurns>(m, "DeviceTurns")
        .def(nb::init<int, int, double, double>(), "fd"_a, "account"_a, "weight"_a, "max_share"_a)
        .def("wait", &DeviceTurns::wait, nb::call_guard<nb::gil_scoped_release>())
        .def("charge", &DeviceTurns::charge, "device_ns"_a)
        .def("rest", &DeviceTurns::rest)
        .def("is_contended", &DeviceTurns::is_contended)
        .def_prop_ro("device_s", &DeviceTurns::device_s)
        .def_prop_ro("waited_s", &DeviceTurns::waited_s);
}

}  // namespace swiftkv
