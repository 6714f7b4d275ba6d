#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <limits>
#include <stdexcept>
#include <string>

#include "copy_engine.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace swiftkv;

namespace {

using RunArray = nb::ndarray<const int64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;

Runs to_runs(const RunArray& array, int64_t width_bytes, int64_t block_bytes) {
    static_assert(sizeof(Run) == 5 * sizeof(int64_t));
    return {{reinterpret_cast<const Run*>(array.data()), array.shape(0)}, width_bytes, block_bytes};
}

std::span<std::byte> memory_at(uintptr_t address, size_t nbytes) {
    uintptr_t end = 0;
    if (nbytes > 0 && (address == 0 || nbytes > static_cast<size_t>(std::numeric_limits<int64_t>::max()) ||
                       __builtin_add_overflow(address, nbytes, &end)))
        throw std::invalid_argument("address, nbytes: no memory of " + std::to_string(nbytes) + " bytes begins at " +
                                    std::to_string(address));
    return {reinterpret_cast<std::byte*>(address), nbytes};
}

}  // namespace

NB_MODULE(_transport, m) {
    m.doc() = "Copies between pools that are mapped into this process.";
    const nb::object copy_error =
        nb::steal(PyErr_NewException("swiftkv._transport.CopyError", PyExc_RuntimeError, nullptr));
    m.attr("CopyError") = copy_error;
    nb::register_exception_translator(
        [](const std::exception_ptr& thrown, void* type) {
            try {
                std::rethrow_exception(thrown);
            } catch (const CopyError& error) {
                PyErr_SetObject(static_cast<PyObject*>(type), nb::make_tuple(error.what(), error.link).ptr());
            }
        },
        copy_error.ptr());
    nb::class_<CopyEngine>(m, "CopyEngine")
        .def(
            "__init__",
            [](CopyEngine* self, uintptr_t address, size_t nbytes, int num_threads, size_t max_timings) {
                new (self) CopyEngine(memory_at(address, nbytes), num_threads, max_timings);
            },
            "address"_a, "nbytes"_a, "num_threads"_a = 1, "max_timings"_a = 4096)
        .def(
            "set_space",
            [](CopyEngine& self, int64_t link, uintptr_t address, size_t nbytes) {
                self.set_space(link, memory_at(address, nbytes));
            },
            "link"_a, "address"_a, "nbytes"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("clear_space", &CopyEngine::clear_space, "link"_a, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "submit",
            [](CopyEngine& self, RunArray to_peer, int64_t to_width, int64_t to_block, RunArray from_peer,
               int64_t from_width, int64_t from_block, int64_t layer) {
                nb::gil_scoped_release released;
                return self.submit(to_runs(to_peer, to_width, to_block), to_runs(from_peer, from_width, from_block),
                                   layer);
            },
            "to_peer"_a, "to_width_bytes"_a, "to_block_bytes"_a, "from_peer"_a, "from_width_bytes"_a,
            "from_block_bytes"_a, "layer"_a)
        .def("wait", &CopyEngine::wait, "ticket"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("settle", &CopyEngine::settle, nb::call_guard<nb::gil_scoped_release>())
        .def("take_timings", [](CopyEngine& self) {
            const std::vector<JobTiming> timings = self.take_timings();
            return nb::bytes(reinterpret_cast<const char*>(timings.data()), timings.size() * sizeof(JobTiming));
        });
}
