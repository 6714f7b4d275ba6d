#include "bind_storage.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>
#include <vector>

#include "../common/arrays.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace swiftkv {
namespace {

WritePolicy write_policy_named(const std::string& name) {
    if (name == "write_through") return WritePolicy::kWriteThrough;
    if (name == "write_through_selective") return WritePolicy::kWriteThroughSelective;
    if (name == "write_back") return WritePolicy::kWriteBack;
    if (name == "never") return WritePolicy::kNever;
    throw std::invalid_argument(
        "write_policy must be write_through, write_through_selective, write_back or never, not " + name);
}

nb::bytes bytes_of(const std::vector<BlockKey>& keys) {
    return nb::bytes(reinterpret_cast<const char*>(keys.data()), keys.size() * sizeof(BlockKey));
}

nb::tuple take_offers(Scheduler& self, int max_blocks) {
    const std::vector<StoredBlock> taken = without_gil([&] { return self.take_offers(max_blocks); });
    std::vector<BlockKey> keys;
    std::vector<int32_t> groups, links;
    std::vector<int64_t> offsets_bytes;
    for (const StoredBlock& block : taken) {
        keys.push_back(block.key);
        groups.push_back(block.group);
        links.push_back(block.link);
        offsets_bytes.push_back(block.offset_bytes);
    }
    return nb::make_tuple(bytes_of(keys), to_array(std::move(groups)), to_array(std::move(links)),
                          to_array(std::move(offsets_bytes)));
}

nb::tuple look_up(Scheduler& self, RequestId request_id) {
    Scheduler::Lookup found = without_gil([&] { return self.look_up(request_id); });
    return nb::make_tuple(bytes_of(found.keys), to_array(std::move(found.is_resident)), found.num_usable);
}

std::optional<double> evicted_age_s(const Scheduler& self, const nb::bytes& key) {
    BlockKey named;
    if (key.size() != sizeof named) throw std::invalid_argument("key must have 32 bytes");
    std::memcpy(named.data(), key.c_str(), sizeof named);
    return without_gil([&] { return self.evicted_age_s(named); });
}

nb::tuple begin_load(Scheduler& self, RequestId request_id, int num_blocks, int first,
                     std::optional<Input<int32_t>> pinned) {
    const PinnedChunks chunks = pinned ? span_of(*pinned) : PinnedChunks();
    const std::vector<LoadingBlock> loading =
        without_gil([&] { return self.begin_load(request_id, num_blocks, first, chunks); });
    std::vector<int32_t> indices, groups, blocks;
    std::vector<int64_t> offsets_bytes;
    std::vector<uint8_t> has_pin;
    for (const LoadingBlock& block : loading) {
        has_pin.push_back(block.chunk != kNone);
        indices.push_back(block.index);
        groups.push_back(block.group);
        blocks.push_back(block.block);
        offsets_bytes.push_back(block.offset_bytes);
    }
    return nb::make_tuple(to_array(std::move(indices)), to_array(std::move(groups)), to_array(std::move(blocks)),
                          to_array(std::move(offsets_bytes)), to_array(std::move(has_pin)));
}

std::vector<LoadedBlock> loaded_blocks(Input<int32_t> groups, Input<int32_t> blocks) {
    if (groups.size() != blocks.size()) throw std::invalid_argument("blocks: each of them needs a group");
    std::vector<LoadedBlock> loaded;
    for (size_t i = 0; i < blocks.size(); ++i) loaded.push_back({groups.data()[i], blocks.data()[i]});
    return loaded;
}

}  // namespace

std::vector<BlockKey> block_keys_of(nb::bytes keys) {
    if (keys.size() % sizeof(BlockKey)) throw std::invalid_argument("keys: each must have 32 bytes");
    std::vector<BlockKey> block_keys(keys.size() / sizeof(BlockKey));
    if (!block_keys.empty()) std::memcpy(block_keys.data(), keys.c_str(), keys.size());
    return block_keys;
}

void bind_storage(nb::class_<Scheduler>& scheduler) {
    const nb::call_guard<nb::gil_scoped_release> unlocked;
    scheduler
        .def(
            "set_write_policy",
            [](Scheduler& self, const std::string& name) {
                const WritePolicy policy = write_policy_named(name);
                nb::gil_scoped_release released;
                self.set_write_policy(policy);
            },
            "write_policy"_a)
        .def("take_offers", &take_offers, "max_blocks"_a)
        .def("end_copying", &Scheduler::end_copying, unlocked)
        .def(
            "offer_prefix",
            [](Scheduler& self, nb::bytes keys) {
                const std::vector<BlockKey> block_keys = block_keys_of(keys);
                nb::gil_scoped_release released;
                self.offer_prefix(block_keys);
            },
            "keys"_a)
        .def("num_offers", &Scheduler::num_offers, unlocked)
        .def("num_dropped_offers", &Scheduler::num_dropped_offers, unlocked)
        .def("evicted_age_s", &evicted_age_s, "key"_a)
        .def("hold", &Scheduler::hold, "request_id"_a, unlocked)
        .def("let_go", &Scheduler::let_go, "request_id"_a, unlocked)
        .def("look_up", &look_up, "request_id"_a)
        .def("prefill_s", &Scheduler::prefill_s, "begin"_a, "end"_a, unlocked)
        .def(
            "loadable",
            [](Scheduler& self, RequestId request_id, Input<uint8_t> is_stored, int max_blocks,
               std::optional<Input<int32_t>> pinned) {
                const PinnedChunks chunks = pinned ? span_of(*pinned) : PinnedChunks();
                nb::gil_scoped_release released;
                return self.loadable(request_id, span_of(is_stored), max_blocks, chunks);
            },
            "request_id"_a, "is_stored"_a.noconvert(), "max_blocks"_a, "pinned"_a = nb::none())
        .def("begin_load", &begin_load, "request_id"_a, "num_blocks"_a, "first"_a = 0, "pinned"_a = nb::none())
        .def("take_unpinned",
             [](Scheduler& self) { return to_array(without_gil([&] { return self.take_unpinned(); })); })
        .def("evict_host", &Scheduler::evict_host, unlocked)
        .def_prop_ro("can_meet", &Scheduler::can_meet)
        .def("meet", &Scheduler::meet, "request_id"_a, "num_blocks"_a, unlocked)
        .def("num_planned_blocks", &Scheduler::num_planned_blocks, "request_id"_a, unlocked)
        .def(
            "forget_loading",
            [](Scheduler& self, Input<int32_t> groups, Input<int32_t> blocks) {
                const std::vector<LoadedBlock> loading = loaded_blocks(groups, blocks);
                nb::gil_scoped_release released;
                self.forget_loading(loading);
            },
            "groups"_a.noconvert(), "blocks"_a.noconvert())
        .def(
            "end_load",
            [](Scheduler& self, Input<int32_t> groups, Input<int32_t> blocks, bool is_loaded) {
                const std::vector<LoadedBlock> loaded = loaded_blocks(groups, blocks);
                nb::gil_scoped_release released;
                self.end_load(loaded, is_loaded);
            },
            "groups"_a.noconvert(), "blocks"_a.noconvert(), "is_loaded"_a);
}

}  // namespace swiftkv
