#pragma once

#include "dtype.h"
#include "isa.h"

namespace swiftkv {

// The last operation of a matrix product, on its complete float32 sums.
enum class Epilogue : int {
    kStore = 0,     // out = sums
    kResidual = 1,  // out += sums
    kGated = 2,     // out = a gated activation of gate and up; a panel is half gate, half up
};
inline constexpr int kNumEpilogues = 3;

// The activation (up' + up_offset) * gate' / (1 + exp(-alpha * gate' - cubic * gate'^3)), where gate' = min(gate,
// limit) and up' is up clamped to [-limit, limit].
struct GatedActivation {
    float alpha;
    float cubic;
    float limit;
    float up_offset;
};
inline constexpr GatedActivation kSilu{1.0f, 0.0f, __builtin_inff(), 0.0f};  // silu(gate) * up

enum class NormWeight : int { kSameDType = 0, kFloat32 = 1 };
inline constexpr int kNumNormWeights = 2;

// sums[rows][panel_width] + bias[panel_width] (may be null) -> out[rows][count], rows of out out_stride_bytes apart.
// Only kGated reads `gated`.
using Finish = void (*)(const float* sums, int64_t rows, const float* bias, int64_t panel_width, int64_t count,
                        const GatedActivation& gated, void* out, int64_t out_stride_bytes);

// All arithmetic in float32; a row's result does not depend on other rows.
struct ElementwiseKernels {
    // out[k] = x / sqrt(mean(x^2) + eps), rounded to dtype, times weight of the same dtype, rounded to dtype. With
    // kFloat32, the weight is float32, and only the product is rounded.
    void (*rms_norm[kNumNormWeights][kNumDTypes])(const void* x, const void* weight, float eps, int64_t k, void* out);
    // The same values, stored as float32.
    void (*rms_norm_widen[kNumNormWeights][kNumDTypes])(const void* x, const void* weight, float eps, int64_t k,
                                                        float* out);
    void (*widen[kNumDTypes])(const void* x, int64_t k, float* out);
    Finish finish[kNumEpilogues][kNumDTypes];
    // out[k] += the sum of weights[i] * rows[i][k] over `count` rows in their order, rounded once.
    void (*add_weighted[kNumDTypes])(const void* const* rows, const float* weights, int64_t count, int64_t k,
                                     void* out);
    void (*softmax)(const float* x, int64_t n, float* out);
    void (*sigmoid)(const float* x, int64_t n, float* out);
};

extern const ElementwiseKernels kElementwiseAvx2;
extern const ElementwiseKernels kElementwiseAvx512;
extern const ElementwiseKernels kElementwiseAvx512Bf16;

const ElementwiseKernels& elementwise_kernels(Isa isa);

}  // namespace swiftkv
