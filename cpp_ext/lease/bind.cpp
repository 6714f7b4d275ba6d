#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "../common/arrays.h"
#include "borrower_ledger.h"
#include "lender_ledger.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace swiftkv;

namespace {

using LeaseArrays = std::pair<Array<ExtentId>, Array<Epoch>>;
using Table = std::pair<Array<uint8_t>, Array<Epoch>>;

LeaseArrays to_arrays(Leases leases) {
    return {to_array(std::move(leases.extents)), to_array(std::move(leases.epochs))};
}

template <class Ledger>
Ledger* create(void* place, int num_extents) {
    if (num_extents < 0) throw std::invalid_argument("num_extents must not be negative");
    return new (place) Ledger(num_extents);
}

template <class Ledger>
Table table(const Ledger& self) {
    std::vector<uint8_t> states(self.states().begin(), self.states().end());
    return {to_array(std::move(states)), to_array(self.epochs())};
}

void bind_lender(nb::module_& m) {
    nb::class_<LenderLedger>(m, "LenderLedger")
        .def(
            "__init__", [](LenderLedger* self, int num_extents) { create<LenderLedger>(self, num_extents); },
            "num_extents"_a)
        .def_prop_ro("num_extents", &LenderLedger::num_extents)
        .def_prop_ro("home", [](const LenderLedger& self) { return self.count(LenderLedger::kHome); })
        .def_prop_ro("offered", [](const LenderLedger& self) { return self.count(LenderLedger::kOffered); })
        .def_prop_ro("lent", [](const LenderLedger& self) { return self.count(LenderLedger::kLent); })
        .def_prop_ro("recalled", [](const LenderLedger& self) { return self.count(LenderLedger::kRecalled); })
        .def(
            "offer",
            [](LenderLedger& self, Input<ExtentId> extents) {
                return to_array(without_gil([&] { return self.offer(span_of(extents)); }));
            },
            "extents"_a.noconvert())
        .def(
            "on_accept",
            [](LenderLedger& self, Input<ExtentId> extents, Input<Epoch> epochs) {
                without_gil([&] { self.on_accept(span_of(extents), span_of(epochs)); });
            },
            "extents"_a.noconvert(), "epochs"_a.noconvert())
        .def(
            "recall",
            [](LenderLedger& self, int count) { return to_arrays(without_gil([&] { return self.recall(count); })); },
            "count"_a)
        .def(
            "on_return",
            [](LenderLedger& self, Input<ExtentId> extents, Input<Epoch> epochs) {
                return to_array(without_gil([&] { return self.on_return(span_of(extents), span_of(epochs)); }));
            },
            "extents"_a.noconvert(), "epochs"_a.noconvert())
        .def("peer_died", [](LenderLedger& self) { return to_array(without_gil([&] { return self.peer_died(); })); })
        .def("table", &table<LenderLedger>);
}

void bind_borrower(nb::module_& m) {
    nb::class_<BorrowerLedger>(m, "BorrowerLedger")
        .def(
            "__init__", [](BorrowerLedger* self, int num_extents) { create<BorrowerLedger>(self, num_extents); },
            "num_extents"_a)
        .def_prop_ro("num_extents", &BorrowerLedger::num_extents)
        .def_prop_ro("none", [](const BorrowerLedger& self) { return self.count(BorrowerLedger::kNone); })
        .def_prop_ro("held", [](const BorrowerLedger& self) { return self.count(BorrowerLedger::kHeld); })
        .def_prop_ro("recalled", [](const BorrowerLedger& self) { return self.count(BorrowerLedger::kRecalled); })
        .def(
            "on_offer",
            [](BorrowerLedger& self, Input<ExtentId> extents, Input<Epoch> epochs) {
                auto offered = without_gil([&] { return self.on_offer(span_of(extents), span_of(epochs)); });
                auto [accepted, accepted_epochs] = to_arrays(std::move(offered.accepted));
                return std::tuple(to_array(std::move(offered.taken)), accepted, accepted_epochs);
            },
            "extents"_a.noconvert(), "epochs"_a.noconvert())
        .def(
            "on_recall",
            [](BorrowerLedger& self, Input<ExtentId> extents, Input<Epoch> epochs) {
                auto recalled = without_gil([&] { return self.on_recall(span_of(extents), span_of(epochs)); });
                auto [returned, returned_epochs] = to_arrays(std::move(recalled.returned));
                return std::tuple(to_array(std::move(recalled.to_drain)), returned, returned_epochs);
            },
            "extents"_a.noconvert(), "epochs"_a.noconvert())
        .def(
            "give_back",
            [](BorrowerLedger& self, Input<ExtentId> extents) {
                return to_array(without_gil([&] { return self.give_back(span_of(extents)); }));
            },
            "extents"_a.noconvert())
        .def("lender_died",
             [](BorrowerLedger& self) { return to_array(without_gil([&] { return self.lender_died(); })); })
        .def("table", &table<BorrowerLedger>);
}

}  // namespace

NB_MODULE(_lease, m) {
    m.doc() = "Who holds which extent: the lender's table of a link and the borrower's replica of it.";
    bind_lender(m);
    bind_borrower(m);
}
