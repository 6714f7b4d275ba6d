#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "attention.h"
#include "deferral.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace swiftkv {
namespace {

struct TypedSpec {
    AttentionSpec spec;
    DType dtype;
};

void check_head_dim(const std::string& name, int dim) {
    if (dim < 16 || dim > kMaxHeadDim || dim % 16 != 0)
        throw std::invalid_argument(name + " must be a multiple of 16 up to 256, not " + std::to_string(dim));
}

TypedSpec make_spec(DType dtype, const AttentionSpec& spec) {
    const auto& [num_heads, num_kv_heads, head_dim, v_head_dim, block_size, window, scale, soft_cap] = spec;
    if (num_kv_heads < 1 || num_heads < 1 || num_heads % num_kv_heads != 0)
        throw std::invalid_argument("num_heads must be a multiple of num_kv_heads");
    check_head_dim("head_dim", head_dim);
    check_head_dim("v_head_dim", v_head_dim);
    if (block_size < kGroupTokens || block_size % kGroupTokens != 0)
        throw std::invalid_argument("block_size must be a multiple of 16, not " + std::to_string(block_size));
    if (window < 0) throw std::invalid_argument("window must not be negative");
    if (soft_cap < 0) throw std::invalid_argument("soft_cap must not be negative");
    return {spec, dtype};
}

template <typename T>
T* address(uintptr_t value) {
    return reinterpret_cast<T*>(value);
}

}  // namespace

void bind_attention(nb::module_& m) {
    nb::class_<TypedSpec>(m, "AttentionSpec")
        .def(
            "__init__",
            [](TypedSpec* self, DType dtype, int num_heads, int num_kv_heads, int head_dim, int v_head_dim,
               int block_size, int window, float scale, float soft_cap) {
                new (self) TypedSpec(make_spec(
                    dtype, {num_heads, num_kv_heads, head_dim, v_head_dim, block_size, window, scale, soft_cap}));
            },
            "dtype"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "v_head_dim"_a, "block_size"_a, "window"_a,
            "scale"_a, "soft_cap"_a);
    nb::class_<AttentionBatch>(m, "AttentionBatch")
        .def(
            "__init__",
            [](AttentionBatch* self, uintptr_t positions, uintptr_t query_starts, uintptr_t context_lens,
               uintptr_t block_table, uintptr_t table_starts, int num_seqs) {
                new (self) AttentionBatch{address<const int32_t>(positions),    address<const int32_t>(query_starts),
                                          address<const int32_t>(context_lens), address<const int32_t>(block_table),
                                          address<const int32_t>(table_starts), num_seqs};
            },
            "positions"_a, "query_starts"_a, "context_lens"_a, "block_table"_a, "table_starts"_a, "num_seqs"_a);
    m.def(
        "rope_write_kv",
        [](const TypedSpec& spec, const AttentionBatch& batch, uintptr_t cos_sin, int rotary_dim, uintptr_t q_norm,
           uintptr_t k_norm, NormWeight norm_weight, float eps, uintptr_t qkv, uintptr_t pool, int layer) {
            const RopeArgs rope{address<const float>(cos_sin), rotary_dim,  address<const void>(q_norm),
                                address<const void>(k_norm),   norm_weight, eps};
            nb::gil_scoped_release release;
            Deferral::run_or_wait([=] {
                rope_write_kv(spec.spec, batch, spec.dtype, rope, address<void>(qkv), address<void>(pool), layer);
            });
        },
        "spec"_a, "batch"_a, "cos_sin"_a, "rotary_dim"_a, "q_norm"_a, "k_norm"_a, "norm_weight"_a, "eps"_a, "qkv"_a,
        "pool"_a, "layer"_a);
    m.def(
        "attention",
        [](const TypedSpec& spec, const AttentionBatch& batch, uintptr_t qkv, uintptr_t pool, int layer,
           uintptr_t sinks, uintptr_t out) {
            nb::gil_scoped_release release;
            Deferral::run_or_wait([=] {
                attention(spec.spec, batch, spec.dtype, address<const void>(qkv), address<const void>(pool), layer,
                          address<const float>(sinks), address<void>(out));
            });
        },
        "spec"_a, "batch"_a, "qkv"_a, "pool"_a, "layer"_a, "sinks"_a, "out"_a);
}

}  // namespace swiftkv
