#pragma once

#include <cstdint>
#include <optional>

#include "gemm.h"

namespace swiftkv {

// The number of rows in a chunk of a few microseconds of work.
int64_t row_grain(int64_t row_elements);

// Rows divided into blocks of nearly equal sizes, none larger than a kernel takes at once.
struct RowBlocks {
    int64_t rows;
    int64_t count;

    RowBlocks(const GemmKernel& kernel, int64_t num_rows);
    int64_t begin(int64_t block) const { return block * rows / count; }
    int64_t size(int64_t block) const { return begin(block + 1) - begin(block); }
    int64_t of(int64_t row) const { return ((row + 1) * count - 1) / rows; }
};

// Rows of activations as a kernel reads them. Either each row is contiguous, or rows are interleaved: in each of the
// RowBlocks, the first cache lines of all rows come first, then the second ones, and so on.
struct Activations {
    const char* data;
    int64_t stride_bytes;  // from row to row, if they are whole
    bool interleaved = false;
};

// Whether a product can read interleaved rows.
bool takes_interleaved(const PackedLinear& weights);

// Returns `x`, or a copy that is normalised, widened to float32 or padded to a multiple of `k_multiple` as required.
// The copy lasts until the next call of this thread. It is interleaved if it is normalised and the kernel reads
// interleaved rows faster. A copy for that alone would cost more than it gains.
Activations prepare(const PackedLinear& weights, const void* x, int64_t rows, const std::optional<RmsNorm>& norm);

}  // namespace swiftkv
