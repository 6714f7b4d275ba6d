#include <vector>

#include "../common/arrays.h"
#include "bind_storage.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace swiftkv {
namespace {

nb::tuple pin(Scheduler& self, PinId pin_id, nb::bytes keys, double max_share) {
    const std::vector<BlockKey> block_keys = block_keys_of(keys);
    const PinOutcome outcome = without_gil([&] { return self.pin(pin_id, block_keys, max_share); });
    return nb::make_tuple(outcome.length, outcome.share, outcome.is_kept);
}

}  // namespace

void bind_pins(nb::class_<Scheduler>& scheduler) {
    scheduler.def("pin", &pin, "pin_id"_a, "keys"_a, "max_share"_a)
        .def("unpin", &Scheduler::unpin, "pin_id"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("take_lost_pins",
             [](Scheduler& self) { return to_array(without_gil([&] { return self.take_lost_pins(); })); });
}

}  // namespace swiftkv
