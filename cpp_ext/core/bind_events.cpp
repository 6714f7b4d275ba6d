#include <string>
#include <vector>

#include "../common/arrays.h"
#include "bind_storage.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace swiftkv {
namespace {

// Joins the keys of items, 32 bytes each.
template <class Item, class KeyOf>
nb::bytes join_keys(const std::vector<Item>& items, KeyOf key_of) {
    std::vector<BlockKey> keys;
    for (const Item& item : items) keys.push_back(key_of(item));
    return nb::bytes(reinterpret_cast<const char*>(keys.data()), keys.size() * sizeof(BlockKey));
}

nb::tuple take_kv_events(Scheduler& self) {
    KvEvents taken = without_gil([&] { return self.take_kv_events(); });
    std::vector<uint8_t> kinds, places, texts;
    std::vector<int32_t> groups;
    for (const KvEvent& event : taken.events) {
        kinds.push_back(static_cast<uint8_t>(event.kind));
        places.push_back(static_cast<uint8_t>(event.place));
        groups.push_back(event.group);
        texts.push_back(event.has_tokens ? (event.is_first ? 1 : 2) : 0);
    }
    return nb::make_tuple(
        to_array(std::move(kinds)), to_array(std::move(places)), to_array(std::move(groups)),
        to_array(std::move(texts)), join_keys(taken.events, [](const KvEvent& event) { return event.key; }),
        join_keys(taken.events, [](const KvEvent& event) { return event.parent; }), to_array(std::move(taken.tokens)));
}

nb::tuple resident_blocks(const Scheduler& self) {
    const std::vector<ResidentBlock> resident = without_gil([&] { return self.resident_blocks(); });
    std::vector<uint8_t> places;
    std::vector<int32_t> groups;
    for (const ResidentBlock& block : resident) {
        places.push_back(static_cast<uint8_t>(block.place));
        groups.push_back(block.group);
    }
    return nb::make_tuple(join_keys(resident, [](const ResidentBlock& block) { return block.key; }),
                          to_array(std::move(groups)), to_array(std::move(places)));
}

}  // namespace

void bind_events(nb::class_<Scheduler>& scheduler) {
    scheduler
        .def("enable_kv_events", &Scheduler::enable_kv_events, "max_events"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("take_kv_events", &take_kv_events)
        .def("resident_blocks", &resident_blocks);
}

}  // namespace swiftkv
