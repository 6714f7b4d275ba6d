#pragma once

#include "dtype.h"
#include "isa.h"

namespace swiftkv {

// What becomes of a row of a matrix product once its float32 sums are complete.
enum class Epilogue : int {
    kStore = 0,     // out = sums
    kResidual = 1,  // out += sums
    kSiluMul = 2,   // out = silu(gate) * up; a panel is half gate, half up
};
inline constexpr int kNumEpilogues = 3;

// One row at a time. All arithmetic in float32; a row's result does not depend on other rows.
struct ElementwiseKernels {
    // out[k] = x / sqrt(mean(x^2) + eps), rounded to dtype, times weight, rounded to dtype.
    void (*rms_norm[kNumDTypes])(const void* x, const void* weight, float eps, int64_t k, void* out);
    // The same values, stored as float32.
    void (*rms_norm_widen[kNumDTypes])(const void* x, const void* weight, float eps, int64_t k, float* out);
    void (*widen[kNumDTypes])(const void* x, int64_t k, float* out);
    // sums[panel_width] + bias (may be null) -> `count` outputs; panel_width is count rounded up to whole panels.
    void (*finish[kNumEpilogues][kNumDTypes])(const float* sums, const float* bias, int64_t panel_width, int64_t count,
                                              void* out);
};

extern const ElementwiseKernels kElementwiseAvx2;
extern const ElementwiseKernels kElementwiseAvx512;

const ElementwiseKernels& elementwise_kernels(Isa isa);

}  // namespace swiftkv
