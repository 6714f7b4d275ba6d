#pragma once

#include <cstdint>
#include <optional>

#include "elementwise.h"
#include "gemm_pack.h"

namespace swiftkv {

struct RmsNorm {
    const void* weight;  // [in_features]
    NormWeight kind;
    float eps;
};

// out[rows, outputs] (+)= epilogue(norm(x[rows, in_features]) @ weights.T + bias). x and norm have the weights' dtype,
// out has out_dtype. A row's bits depend neither on other rows nor on the number of threads.
void linear(const PackedLinear& weights, const void* x, int64_t rows, std::optional<RmsNorm> norm, Epilogue epilogue,
            DType out_dtype, void* out);

// out[rows, outputs of down] (+)= down(activation(gate_up(norm(x[rows, in_features])))). All have one dtype, to which
// the activation is rounded, too. `out` may be `x`.
void gated_mlp(const PackedLinear& gate_up, const PackedLinear& down, const void* x, int64_t rows,
               std::optional<RmsNorm> norm, const GatedActivation& gated, Epilogue epilogue, void* out);

// out[rows, k] = rms_norm(x[rows, k]); see ElementwiseKernels.
void rms_norm(const void* x, int64_t rows, int64_t k, RmsNorm norm, DType dtype, void* out);

// residual[rows, k] += rms_norm(x[rows, k]), which is rounded before.
void rms_norm_residual(const void* x, int64_t rows, int64_t k, RmsNorm norm, DType dtype, void* residual);

// out[i] = table[ids[i]]. Throws std::out_of_range for an id outside [0, vocab_size).
void embed(const int32_t* ids, int64_t count, const void* table, int64_t vocab_size, int64_t row_bytes, void* out);

}  // namespace swiftkv
