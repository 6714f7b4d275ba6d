#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "deferral.h"
#include "gemm.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace swiftkv {
namespace {

template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Addresses of codes, factors and zeros (or 0), the number of rows, and the address of their bias (or 0).
using CodedSource = std::tuple<uintptr_t, uintptr_t, uintptr_t, int64_t, uintptr_t>;

WeightCodes codes_of(const std::vector<CodedSource>& sources, CodeKind kind, const std::vector<float>& values,
                     int64_t group_size) {
    WeightCodes format{kind, {}, group_size, !sources.empty() && std::get<2>(sources[0]) != 0};
    if (values.size() != (kind == CodeKind::kFourBits ? std::size(format.values) : 0))
        throw std::invalid_argument("codes of four bits have 16 values, others none");
    if (kind == CodeKind::kFp8 && format.has_zeros) throw std::invalid_argument("FP8 has no zeros");
    std::copy(values.begin(), values.end(), format.values);
    for (const CodedSource& source : sources)
        if ((std::get<2>(source) != 0) != format.has_zeros)
            throw std::invalid_argument("all sources have zeros, or none has");
    return format;
}

std::optional<RmsNorm> norm_at(uintptr_t weight, NormWeight kind, float eps) {
    if (weight == 0) return std::nullopt;
    return RmsNorm{at<const void>(weight), kind, eps};
}

}  // namespace

void bind_gemm(nb::module_& m) {
    const auto no_gil = nb::call_guard<nb::gil_scoped_release>();

    nb::enum_<DType>(m, "DType").value("F32", DType::kF32).value("BF16", DType::kBf16).value("F16", DType::kF16);
    nb::enum_<CodeKind>(m, "CodeKind")
        .value("FOUR_BITS", CodeKind::kFourBits)
        .value("INT8", CodeKind::kInt8)
        .value("FP8", CodeKind::kFp8);
    nb::enum_<Epilogue>(m, "Epilogue").value("STORE", Epilogue::kStore).value("RESIDUAL", Epilogue::kResidual);
    nb::enum_<NormWeight>(m, "NormWeight")
        .value("SAME_DTYPE", NormWeight::kSameDType)
        .value("FLOAT32", NormWeight::kFloat32);
    nb::class_<GatedActivation>(m, "GatedActivation")
        .def(
            "__init__",
            [](GatedActivation* self, float alpha, float cubic, float limit, float up_offset) {
                new (self) GatedActivation{alpha, cubic, limit, up_offset};
            },
            "alpha"_a, "cubic"_a, "limit"_a, "up_offset"_a);

    nb::class_<PackedLinear>(m, "PackedLinear")
        .def(
            "__init__",
            [](PackedLinear* self, const std::vector<std::tuple<uintptr_t, int64_t, uintptr_t>>& sources,
               int64_t in_features, DType dtype, bool interleave) {
                std::vector<WeightRows> rows;
                for (const auto& [data, count, bias] : sources)
                    rows.push_back({at<const void>(data), count, at<const float>(bias)});
                nb::gil_scoped_release release;
                new (self) PackedLinear(rows, in_features, dtype, interleave);
            },
            "sources"_a, "in_features"_a, "dtype"_a, "interleave"_a)
        .def(
            "__init__",
            [](PackedLinear* self, const std::vector<CodedSource>& sources, CodeKind kind,
               const std::vector<float>& values, int64_t group_size, int64_t in_features, DType dtype,
               bool interleave) {
                const WeightCodes format = codes_of(sources, kind, values, group_size);
                std::vector<CodedRows> rows;
                for (const auto& [codes, factors, zeros, count, bias] : sources)
                    rows.push_back({at<const uint8_t>(codes), at<const float>(factors), at<const int8_t>(zeros), count,
                                    at<const float>(bias)});
                nb::gil_scoped_release release;
                new (self) PackedLinear(rows, format, in_features, dtype, interleave);
            },
            "sources"_a, "kind"_a, "values"_a, "group_size"_a, "in_features"_a, "dtype"_a, "interleave"_a)
        .def_prop_ro("out_features", &PackedLinear::out_features)
        .def_prop_ro("in_features", &PackedLinear::in_features)
        .def_prop_ro("dtype", &PackedLinear::dtype)
        .def_prop_ro("interleaved", &PackedLinear::interleaved)
        .def_prop_ro("nbytes", &PackedLinear::nbytes);

    m.def(
        "linear",
        [](const PackedLinear& weights, uintptr_t x, int64_t rows, uintptr_t norm_weight, NormWeight norm_kind,
           float eps, Epilogue epilogue, DType out_dtype, uintptr_t out) {
            Deferral::run_or_wait([=, &weights] {
                linear(weights, at<const void>(x), rows, norm_at(norm_weight, norm_kind, eps), epilogue, out_dtype,
                       at<void>(out));
            });
        },
        "weights"_a, "x"_a, "rows"_a, "norm_weight"_a, "norm_kind"_a, "eps"_a, "epilogue"_a, "out_dtype"_a, "out"_a,
        no_gil);
    m.def(
        "gated_mlp",
        [](const PackedLinear& gate_up, const PackedLinear& down, uintptr_t x, int64_t rows, uintptr_t norm_weight,
           NormWeight norm_kind, float eps, const GatedActivation& gated, Epilogue epilogue, uintptr_t out) {
            Deferral::run_or_wait([=, &gate_up, &down] {
                gated_mlp(gate_up, down, at<const void>(x), rows, norm_at(norm_weight, norm_kind, eps), gated, epilogue,
                          at<void>(out));
            });
        },
        "gate_up"_a, "down"_a, "x"_a, "rows"_a, "norm_weight"_a, "norm_kind"_a, "eps"_a, "gated"_a, "epilogue"_a,
        "out"_a, no_gil);
    m.def(
        "rms_norm",
        [](uintptr_t x, int64_t rows, int64_t k, uintptr_t weight, NormWeight kind, float eps, DType dtype,
           uintptr_t out) {
            Deferral::run_or_wait([=] {
                rms_norm(at<const void>(x), rows, k, {at<const void>(weight), kind, eps}, dtype, at<void>(out));
            });
        },
        "x"_a, "rows"_a, "k"_a, "weight"_a, "kind"_a, "eps"_a, "dtype"_a, "out"_a, no_gil);
    m.def(
        "rms_norm_residual",
        [](uintptr_t x, int64_t rows, int64_t k, uintptr_t weight, NormWeight kind, float eps, DType dtype,
           uintptr_t residual) {
            Deferral::run_or_wait([=] {
                rms_norm_residual(at<const void>(x), rows, k, {at<const void>(weight), kind, eps}, dtype,
                                  at<void>(residual));
            });
        },
        "x"_a, "rows"_a, "k"_a, "weight"_a, "kind"_a, "eps"_a, "dtype"_a, "residual"_a, no_gil);
    m.def(
        "embed",
        [](uintptr_t ids, int64_t count, uintptr_t table, int64_t vocab_size, int64_t row_bytes, uintptr_t out) {
            Deferral::run_or_wait([=] {
                embed(at<const int32_t>(ids), count, at<const void>(table), vocab_size, row_bytes, at<void>(out));
            });
        },
        "ids"_a, "count"_a, "table"_a, "vocab_size"_a, "row_bytes"_a, "out"_a, no_gil);
}

}  // namespace swiftkv
