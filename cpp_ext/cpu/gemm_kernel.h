#pragma once

#include "dtype.h"
#include "isa.h"

namespace swiftkv {

// The memory that a kernel prefetches on its way through a panel: `lines` lines, `bytes` past each block of weights.
struct Prefetch {
    static constexpr int kAll = -1;  // all lines of a block
    int lines = 0;                   // at most two if a block is one step of k
    int64_t bytes = 0;
};

// The sizes into which products of many rows are cut, measured on cores with a second-level cache of 1 to 2 MiB.
struct Blocking {
    int64_t max_rows;                 // rows of a tile
    int64_t resident_bytes;           // a tile's activations, which stay in the second-level cache while panels pass
    int64_t piece_bytes;              // a part of a panel that all rows of a tile use before the next is touched
    int64_t interleaved_piece_bytes;  // the same for interleaved rows
    int64_t bypass_bytes;             // results of at least this size are written past the caches; 0: never
};

// The matrix kernel of one instruction set. Weights of N outputs and K inputs are packed in consecutive panels of
// panel_width outputs. The last panel is padded with zeros after N, and each panel after K to a multiple of k_multiple:
// [K / k_step / block_steps][panel_width / block_width][block_steps][block_width][k_step]
struct GemmKernel {
    int panel_width;
    int block_width;
    int block_steps;
    int k_step;
    int k_multiple;          // inputs are padded to a multiple of it, in panels and (with zeros) in activations
    int max_rows;            // rows that one call of `multiply` takes
    bool widen_activations;  // activations come as float32 whatever the dtype of the weights
    bool interleave_rows;  // rows that lie line by line, [K / elements of a cache line][rows][a line], are read faster
    // sums[rows][panel_width] = (first ? 0 : sums) + a[rows][k] * panel[k]. Every sum is one chain over ascending k, so
    // a row's bits depend neither on `rows` nor on where k is cut. Rows are a_stride_bytes apart: one cache line if
    // they are interleaved.
    void (*multiply)(int rows, const void* a, int64_t a_stride_bytes, const void* panel, int64_t k_steps, bool first,
                     float* sums, Prefetch ahead);
    Blocking blocking;
    void (*release)();  // undoes what `multiply` left in the thread's registers; null if nothing
};

extern const GemmKernel kGemmAvx2[kNumDTypes];
extern const GemmKernel kGemmAvx512[kNumDTypes];
extern const GemmKernel kGemmAvx512Bf16;
extern const GemmKernel kCachedGemmAvx2[kNumDTypes];
extern const GemmKernel kCachedGemmAvx512[kNumDTypes];
extern const GemmKernel kGemmAmx;
extern const GemmKernel kGemmAmxEmulated;

const GemmKernel& gemm_kernel(Isa isa, DType dtype);

// The kernel for panels that are unpacked into the first-level cache, piece by piece, just before they are used.
const GemmKernel& cached_gemm_kernel(Isa isa, DType dtype);

}  // namespace swiftkv
