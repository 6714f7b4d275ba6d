#pragma once

#include "dtype.h"
#include "isa.h"

namespace swiftkv {

// The last operation of a matrix product, on its complete float32 sums.
enum class Epilogue : int {
    kStore = 0,     // out = sums
    kResidual = 1,  // out += sums
    kSiluMul = 2,   // out = silu(gate) * up; a panel is half gate, half up
};
inline constexpr int kNumEpilogues = 3;

// All arithmetic in float32; a row's result does not depend on other rows.
struct ElementwiseKernels {
    // out[k] = x / sqrt(mean(x^2) + eps), rounded to dtype, times weight, rounded to dtype.
    void (*rms_norm[kNumDTypes])(const void* x, const void* weight, float eps, int64_t k, void* out);
    // The same values, stored as float32.
    void (*rms_norm_widen[kNumDTypes])(const void* x, const void* weight, float eps, int64_t k, float* out);
    void (*widen[kNumDTypes])(const void* x, int64_t k, float* out);
    // sums[rows][panel_width] + bias[panel_width] (may be null) -> out[rows][count], rows of out out_stride_bytes
    // apart.
    void (*finish[kNumEpilogues][kNumDTypes])(const float* sums, int64_t rows, const float* bias, int64_t panel_width,
                                              int64_t count, void* out, int64_t out_stride_bytes);
};

extern const ElementwiseKernels kElementwiseAvx2;
extern const ElementwiseKernels kElementwiseAvx512;
extern const ElementwiseKernels kElementwiseAvx512Bf16;

const ElementwiseKernels& elementwise_kernels(Isa isa);

}  // namespace swiftkv
