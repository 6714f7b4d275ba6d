#include "gemm.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "gemm_product.h"
#include "scratch.h"
#include "thread_pool.h"

namespace swiftkv {

void linear(const PackedLinear& weights, const void* x, int64_t rows, std::optional<RmsNorm> norm, Epilogue epilogue,
            DType out_dtype, void* out) {
    if (rows > 0) Product(weights, prepare(weights, x, rows, norm), rows, epilogue, out_dtype, out).run();
}

void gated_mlp(const PackedLinear& gate_up, const PackedLinear& down, const void* x, int64_t rows,
               std::optional<RmsNorm> norm, const GatedActivation& gated, Epilogue epilogue, void* out) {
    if (rows == 0) return;
    thread_local Scratch scratch;
    const DType dtype = down.dtype();
    const int64_t row_bytes = down.in_features() * item_size(dtype);
    char* activated = reinterpret_cast<char*>(scratch.reserve(rows * row_bytes));
    const bool interleaved = takes_interleaved(down);
    Product(gate_up, prepare(gate_up, x, rows, norm), rows, Epilogue::kGated, dtype, activated, gated,
            interleaved ? ResultRows::kInterleaved : ResultRows::kWhole)
        .run();
    const Activations between =
        interleaved ? Activations{activated, row_bytes, true} : prepare(down, activated, rows, std::nullopt);
    Product(down, between, rows, epilogue, dtype, out).run();
}

void rms_norm(const void* x, int64_t rows, int64_t k, RmsNorm norm, DType dtype, void* out) {
    const auto kernel =
        elementwise_kernels(active_isa()).rms_norm[static_cast<int>(norm.kind)][static_cast<int>(dtype)];
    const int64_t stride = k * item_size(dtype);
    parallel_for(
        rows,
        [&](int64_t begin, int64_t end, int) {
            for (int64_t r = begin; r < end; ++r)
                kernel(static_cast<const char*>(x) + r * stride, norm.weight, norm.eps, k,
                       static_cast<char*>(out) + r * stride);
        },
        row_grain(k));
}

void rms_norm_residual(const void* x, int64_t rows, int64_t k, RmsNorm norm, DType dtype, void* residual) {
    const ElementwiseKernels& kernels = elementwise_kernels(active_isa());
    const auto normalise = kernels.rms_norm[static_cast<int>(norm.kind)][static_cast<int>(dtype)];
    const auto add = kernels.add_weighted[static_cast<int>(dtype)];
    const int64_t stride = k * item_size(dtype);
    parallel_for(
        rows,
        [&](int64_t begin, int64_t end, int) {
            thread_local Scratch scratch;
            const void* row = scratch.reserve(stride);
            constexpr float kOnce = 1.0f;
            for (int64_t r = begin; r < end; ++r) {
                normalise(static_cast<const char*>(x) + r * stride, norm.weight, norm.eps, k, scratch.reserve(stride));
                add(&row, &kOnce, 1, k, static_cast<char*>(residual) + r * stride);
            }
        },
        row_grain(k));
}

void embed(const int32_t* ids, int64_t count, const void* table, int64_t vocab_size, int64_t row_bytes, void* out) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= vocab_size)
            throw std::out_of_range("token id " + std::to_string(ids[i]) + " is outside the vocabulary of " +
                                    std::to_string(vocab_size));
    parallel_for(
        count,
        [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i)
                std::memcpy(static_cast<char*>(out) + i * row_bytes,
                            static_cast<const char*>(table) + ids[i] * row_bytes, row_bytes);
        },
        row_grain(row_bytes));
}

}  // namespace swiftkv
