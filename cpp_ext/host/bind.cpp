#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../common/buffer.h"
#include "host_memory.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace swiftkv;

namespace {

// The parts of several objects, for a call that runs without the GIL.
class Parts {
  public:
    Parts(const nb::sequence& objects, bool is_writable) {
        for (nb::handle object : objects) {
            const auto pair = nb::cast<nb::tuple>(object);
            if (pair.size() != 2) throw std::invalid_argument("parts: an object is a header and a block");
            buffers_.emplace_back(pair[0], is_writable);
            buffers_.emplace_back(pair[1], is_writable);
        }
    }

    size_t size() const { return buffers_.size() / 2; }
    ObjectParts<std::byte> operator[](size_t i) const { return {buffers_[2 * i].bytes(), buffers_[2 * i + 1].bytes()}; }

  private:
    std::vector<Buffer> buffers_;
};

std::vector<HostKey> to_keys(const nb::sequence& objects) {
    std::vector<HostKey> keys;
    for (nb::handle object : objects) {
        const auto key = nb::cast<nb::bytes>(object);
        if (key.size() != sizeof(HostKey)) throw std::invalid_argument("keys: a key is 32 bytes");
        std::memcpy(keys.emplace_back().data(), key.c_str(), sizeof(HostKey));
    }
    return keys;
}

// The objects in a mapping; keeps the mapping alive.
class Mapped {
  public:
    Mapped(nb::handle memory, uint32_t member) : buffer_(memory, true), memory_(buffer_.bytes(), member) {}

    HostMemory& operator*() { return memory_; }
    HostMemory* operator->() { return &memory_; }

  private:
    Buffer buffer_;
    HostMemory memory_;
};

// Calls `call` for one key after the other. Once it does not get the lock in time, the remaining keys are late.
template <class Call>
std::vector<int> each(const nb::sequence& keys, const nb::sequence& parts, bool is_writable, Call call) {
    const std::vector<HostKey> named = to_keys(keys);
    const Parts held(parts, is_writable);
    if (named.size() != held.size()) throw std::invalid_argument("parts: there must be one for each key");
    std::vector<int> statuses(named.size(), static_cast<int>(HostStatus::kLate));
    const nb::gil_scoped_release released;
    try {
        for (size_t i = 0; i < named.size(); ++i) statuses[i] = static_cast<int>(call(named[i], held[i]));
    } catch (const LockTimeout&) {
    }
    return statuses;
}

}  // namespace

NB_MODULE(_host, m) {
    m.doc() = "Blocks in one mapping that engines share, each of which may be killed at any moment.";
    nb::exception<LockTimeout>(m, "LockTimeout", PyExc_TimeoutError);
    m.def(
        "format_memory",
        [](nb::handle memory, uint32_t chunk_bytes) {
            const Buffer buffer(memory, true);
            HostMemory::format(buffer.bytes(), chunk_bytes);
        },
        "memory"_a, "chunk_bytes"_a);
    m.attr("MAX_MEMBERS") = HostMemory::kMaxMembers;
    m.def("num_chunks", nb::overload_cast<uint64_t, uint32_t>(&HostMemory::num_chunks), "num_bytes"_a, "chunk_bytes"_a);
    nb::class_<Mapped>(m, "HostMemory")
        .def(
            "__init__", [](Mapped* self, nb::handle memory, uint32_t member) { new (self) Mapped(memory, member); },
            "memory"_a, "member"_a = 0)
        .def_prop_ro("chunk_bytes", [](Mapped& self) { return self->chunk_bytes(); })
        .def_prop_ro("chunks_offset_bytes", [](Mapped& self) { return self->chunks_offset_bytes(); })
        .def_prop_ro("num_chunks", [](Mapped& self) { return self->num_chunks(); })
        .def(
            "exists",
            [](Mapped& self, const nb::sequence& keys, double deadline_s) {
                const std::vector<HostKey> named = to_keys(keys);
                std::vector<uint8_t> is_there;
                {
                    const nb::gil_scoped_release released;
                    is_there = (*self).exists(named, deadline_s);
                }
                return std::vector<bool>(is_there.begin(), is_there.end());
            },
            "keys"_a, "deadline_s"_a)
        .def(
            "read",
            [](Mapped& self, const nb::sequence& keys, const nb::sequence& into, double deadline_s) {
                return each(keys, into, true, [&](const HostKey& key, ObjectParts<std::byte> parts) {
                    return (*self).read(key, parts, deadline_s);
                });
            },
            "keys"_a, "into"_a, "deadline_s"_a)
        .def(
            "write",
            [](Mapped& self, const nb::sequence& keys, const nb::sequence& sources, double deadline_s) {
                return each(keys, sources, false, [&](const HostKey& key, ObjectParts<std::byte> parts) {
                    return (*self).write(key, {parts.header, parts.block}, deadline_s);
                });
            },
            "keys"_a, "sources"_a, "deadline_s"_a)
        .def(
            "drop",
            [](Mapped& self, const nb::sequence& keys, double deadline_s) {
                const std::vector<HostKey> named = to_keys(keys);
                const nb::gil_scoped_release released;
                for (const HostKey& key : named) (*self).drop(key, deadline_s);
            },
            "keys"_a, "deadline_s"_a)
        .def(
            "usage",
            [](Mapped& self, double deadline_s) {
                HostMemory::Usage usage;
                {
                    const nb::gil_scoped_release released;
                    usage = (*self).usage(deadline_s);
                }
                return nb::make_tuple(usage.num_objects, usage.num_bytes, usage.bound_bytes, usage.num_repairs);
            },
            "deadline_s"_a)
        .def(
            "pin",
            [](Mapped& self, const nb::sequence& keys, uint64_t num_bytes, double deadline_s) {
                const std::vector<HostKey> named = to_keys(keys);
                const nb::gil_scoped_release released;
                return self->pin(named, num_bytes, deadline_s);
            },
            "keys"_a, "num_bytes"_a, "deadline_s"_a)
        // These keep the GIL: they take less time than a thread may have to wait to get it back.
        .def(
            "unpin", [](Mapped& self, const std::vector<uint32_t>& chunks) { self->unpin(chunks); }, "chunks"_a)
        .def("give_back", [](Mapped& self) { self->give_back(); })
        .def(
            "headers",
            [](Mapped& self, const std::vector<uint32_t>& chunks) {
                nb::list found;
                for (const std::optional<std::span<const std::byte>>& header : self->headers(chunks)) {
                    if (header)
                        found.append(nb::bytes(header->data(), header->size()));
                    else
                        found.append(nb::none());
                }
                return found;
            },
            "chunks"_a)
        .def(
            "note_verified", [](Mapped& self, const std::vector<uint32_t>& chunks) { self->note_verified(chunks); },
            "chunks"_a)
        .def(
            "pinned_by", [](Mapped& self, const std::vector<uint32_t>& chunks) { return self->pinned_by(chunks); },
            "chunks"_a)
        .def("num_wanted", [](Mapped& self) { return self->num_wanted(); })
        .def(
            "release_member",
            [](Mapped& self, uint32_t member, double deadline_s) { self->release_member(member, deadline_s); },
            "member"_a, "deadline_s"_a, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "check_invariants", [](Mapped& self, double deadline_s) { self->check_invariants(deadline_s); },
            "deadline_s"_a, nb::call_guard<nb::gil_scoped_release>());
}
