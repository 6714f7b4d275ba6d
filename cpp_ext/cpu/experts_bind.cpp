#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>

#include "deferral.h"
#include "experts.h"
#include "router.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace swiftkv {
namespace {

template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_experts(nb::module_& m) {
    const auto no_gil = nb::call_guard<nb::gil_scoped_release>();

    nb::enum_<Score>(m, "Score")
        .value("SOFTMAX", Score::kSoftmax)
        .value("SOFTMAX_OF_CHOSEN", Score::kSoftmaxOfChosen)
        .value("SIGMOID", Score::kSigmoid);
    nb::class_<Router>(m, "Router")
        .def(
            "__init__",
            [](Router* self, int64_t num_experts, int64_t top_k, Score score, int64_t num_groups, int64_t top_groups,
               bool renormalise, float scale) {
                new (self) Router{num_experts, top_k, score, num_groups, top_groups, renormalise, scale};
            },
            "num_experts"_a, "top_k"_a, "score"_a, "num_groups"_a, "top_groups"_a, "renormalise"_a, "scale"_a);
    m.def(
        "route",
        [](const Router& router, uintptr_t logits, int64_t num_tokens, uintptr_t select_bias, uintptr_t experts,
           uintptr_t weights) {
            Deferral::run_or_wait([=] {
                route(router, at<const float>(logits), num_tokens, at<const float>(select_bias), at<int32_t>(experts),
                      at<float>(weights));
            });
        },
        "router"_a, "logits"_a, "num_tokens"_a, "select_bias"_a, "experts"_a, "weights"_a, no_gil);

    nb::class_<PackedExperts>(m, "PackedExperts")
        .def(
            "__init__",
            [](PackedExperts* self, int64_t hidden_size, int64_t inner_size, DType dtype,
               const GatedActivation& gated) { new (self) PackedExperts(hidden_size, inner_size, dtype, gated); },
            "hidden_size"_a, "inner_size"_a, "dtype"_a, "gated"_a)
        .def("append", &PackedExperts::append, "gate_up"_a, "down"_a)
        .def("__len__", &PackedExperts::size)
        .def_prop_ro("nbytes", &PackedExperts::nbytes);
    m.def(
        "add_experts",
        [](const PackedExperts& experts, uintptr_t x, uintptr_t chosen, uintptr_t weights, int64_t num_tokens,
           int64_t top_k, uintptr_t tokens_per_expert, uintptr_t residual) {
            Deferral::run_or_wait([=, &experts] {
                add_experts(experts, at<const void>(x),
                            {at<const int32_t>(chosen), at<const float>(weights), num_tokens, top_k},
                            at<int64_t>(tokens_per_expert), at<void>(residual));
            });
        },
        "experts"_a, "x"_a, "chosen"_a, "weights"_a, "num_tokens"_a, "top_k"_a, "tokens_per_expert"_a, "residual"_a,
        no_gil);
}

}  // namespace swiftkv
