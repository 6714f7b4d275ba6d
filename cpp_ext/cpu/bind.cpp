#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include "isa.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace swiftkv {
void bind_gemm(nb::module_& m);       // gemm_bind.cpp
void bind_attention(nb::module_& m);  // attention_bind.cpp
void bind_experts(nb::module_& m);    // experts_bind.cpp
}  // namespace swiftkv

NB_MODULE(_cpu, m) {
    m.doc() = "CPU kernels of swiftkv.";
    m.def("isa", [] { return swiftkv::isa_name(swiftkv::active_isa()); });
    m.def("num_threads", &swiftkv::num_threads);
    m.def("set_num_threads", &swiftkv::set_num_threads, nb::arg("n"));
    swiftkv::bind_gemm(m);
    swiftkv::bind_attention(m);
    swiftkv::bind_experts(m);
}
