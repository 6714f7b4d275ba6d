#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include "isa.h"
#include "thread_pool.h"
#include "token_mask.h"

namespace nb = nanobind;

namespace swiftkv {
void bind_gemm(nb::module_& m);       // gemm_bind.cpp
void bind_attention(nb::module_& m);  // attention_bind.cpp
void bind_experts(nb::module_& m);    // experts_bind.cpp
void bind_turns(nb::module_& m);      // turns_bind.cpp
}  // namespace swiftkv

NB_MODULE(_cpu, m) {
    m.doc() = "CPU kernels of swiftkv.";
    m.def("supported_isa", [] { return swiftkv::isa_name(swiftkv::supported_isa()); });
    m.def("isa", [] { return swiftkv::isa_name(swiftkv::active_isa()); });
    m.def("num_threads", &swiftkv::num_threads);
    m.def("set_num_threads", &swiftkv::set_num_threads, nb::arg("n"));
    m.def(
        "forbid_tokens",
        [](uintptr_t logits, int64_t vocab_size, uintptr_t rows, uintptr_t bits, int64_t num_rows) {
            swiftkv::forbid_tokens(reinterpret_cast<float*>(logits), vocab_size, reinterpret_cast<const int32_t*>(rows),
                                   reinterpret_cast<const uint32_t*>(bits), num_rows);
        },
        nb::arg("logits"), nb::arg("vocab_size"), nb::arg("rows"), nb::arg("bits"), nb::arg("num_rows"),
        nb::call_guard<nb::gil_scoped_release>());
    swiftkv::bind_gemm(m);
    swiftkv::bind_attention(m);
    swiftkv::bind_experts(m);
    swiftkv::bind_turns(m);
}
