#pragma once

#include "dtype.h"
#include "isa.h"

namespace swiftkv {

// What a kernel fetches on its way through a panel: memory `bytes` past the weights of each step of k.
struct Prefetch {
    enum class Lines { kNone, kOne, kTwo, kAll };  // per step; kAll into the first-level cache, others into the second
    Lines lines = Lines::kNone;
    int64_t bytes = 0;
};

// How one instruction set multiplies. Weights of N outputs and K inputs are packed in panels of panel_width outputs; a
// panel is [K / k_step][panel_width][k_step], zero where N or K ends, and panels follow one another.
struct GemmKernel {
    int panel_width;
    int k_step;
    int max_rows;            // rows that one call of `multiply` takes
    bool widen_activations;  // activations come as float32 whatever the dtype of the weights
    // sums[rows][panel_width] = (first ? 0 : sums) + a[rows][k] * panel[k]. Every sum is one chain over ascending k, so
    // a row's bits depend neither on `rows` nor on where k is cut.
    void (*multiply)(int rows, const void* a, int64_t a_stride_bytes, const void* panel, int64_t k_steps, bool first,
                     float* sums, Prefetch ahead);
};

extern const GemmKernel kGemmAvx2[kNumDTypes];
extern const GemmKernel kGemmAvx512[kNumDTypes];
extern const GemmKernel kGemmAvx512Bf16;

const GemmKernel& gemm_kernel(Isa isa, DType dtype);

}  // namespace swiftkv
