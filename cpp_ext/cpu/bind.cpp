#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "deferral.h"
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

namespace {

using Rows = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bits = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Arrays are checked here, which takes a microsecond. After a model's step, numpy's reductions and its `ctypes.data`
// take 100, because the processor's caches then hold none of their code.
void forbid_tokens(uintptr_t logits, int64_t num_rows, int64_t vocab_size, const Rows& rows, const Bits& bits) {
    const auto num_masks = static_cast<int64_t>(rows.shape(0));
    if (static_cast<int64_t>(bits.shape(0)) != num_masks ||
        static_cast<int64_t>(bits.shape(1)) != (vocab_size + 31) / 32)
        throw std::invalid_argument("bits: got " + std::to_string(bits.shape(0)) + " masks of " +
                                    std::to_string(bits.shape(1)) + " words for " + std::to_string(num_masks) +
                                    " rows of " + std::to_string(vocab_size) + " tokens");
    const auto is_there = [num_rows](int32_t row) { return 0 <= row && row < num_rows; };
    if (!std::all_of(rows.data(), rows.data() + num_masks, is_there))
        throw std::invalid_argument("rows: not all of them are in 0 to " + std::to_string(num_rows - 1));
    const nb::gil_scoped_release unlocked;
    swiftkv::forbid_tokens(reinterpret_cast<float*>(logits), vocab_size, rows.data(), bits.data(), num_masks);
}

}  // namespace

NB_MODULE(_cpu, m) {
    m.doc() = "CPU kernels of swiftkv.";
    m.def("supported_isa", [] { return swiftkv::isa_name(swiftkv::supported_isa()); });
    m.def("isa", [] { return swiftkv::isa_name(swiftkv::active_isa()); });
    m.def("amx_is_emulated", &swiftkv::amx_is_emulated);
    m.def("num_threads", &swiftkv::num_threads);
    m.def("set_num_threads", &swiftkv::set_num_threads, nb::arg("n"));
    m.def("forbid_tokens", &forbid_tokens, nb::arg("logits"), nb::arg("num_rows"), nb::arg("vocab_size"),
          nb::arg("rows"), nb::arg("bits"));
    m.def("begin_deferral", &swiftkv::Deferral::begin);
    m.def("run_deferred", &swiftkv::Deferral::run, nb::call_guard<nb::gil_scoped_release>());
    m.def("end_deferral", &swiftkv::Deferral::end);
    swiftkv::bind_gemm(m);
    swiftkv::bind_attention(m);
    swiftkv::bind_experts(m);
    swiftkv::bind_turns(m);
}
