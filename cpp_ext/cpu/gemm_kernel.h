#pragma once

#include "dtype.h"
#include "isa.h"

namespace swiftkv {

// How one instruction set multiplies. Weights of N outputs and K inputs are packed in panels of panel_width outputs; a
// panel is [K / k_step][panel_width][k_step], zero where N or K ends, and panels follow one another.
struct GemmKernel {
    int panel_width;
    int k_step;
    int max_rows;            // rows that one call of `multiply` takes
    bool widen_activations;  // activations come as float32 whatever the dtype of the weights
    // sums[rows][panel_width] = (first ? 0 : sums) + a[rows][k] * panel[k]. Every sum is one chain over ascending k, so
    // a row's bits depend neither on `rows` nor on where k is cut. Memory `prefetch_bytes` ahead of what is being read
    // of the panel is fetched on the way, if not 0.
    void (*multiply)(int rows, const void* a, int64_t a_stride_bytes, const void* panel, int64_t k_steps, bool first,
                     float* sums, int64_t prefetch_bytes);
};

extern const GemmKernel kGemmAvx2[kNumDTypes];
extern const GemmKernel kGemmAvx512[kNumDTypes];
extern const GemmKernel kGemmAvx512Bf16;

const GemmKernel& gemm_kernel(Isa isa, DType dtype);

}  // namespace swiftkv
