#pragma once

#include <cstdint>
#include <optional>

#include "gemm.h"

namespace swiftkv {

// Rows of activations as a kernel reads them.
struct Activations {
    const char* data;
    int64_t stride_bytes;
};

// The number of rows in a chunk of a few microseconds of work.
int64_t row_grain(int64_t row_elements);

// Returns `x`, or a copy that is normalised, widened to float32 or padded to a multiple of `k_multiple` as required.
// The copy lasts until the next call of this thread.
Activations prepare(const PackedLinear& weights, const void* x, int64_t rows, const std::optional<RmsNorm>& norm);

// The most rows of a tile: as many as stay in the second-level cache while panels pass.
int64_t rows_per_tile(const PackedLinear& weights, Activations activations);

// Rows of the activations against one panel.
struct Tile {
    int64_t panel;
    int64_t row_begin;
    int64_t row_end;

    int64_t rows() const { return row_end - row_begin; }
};

// out[rows, outputs] (+)= epilogue(activations[rows, in_features] @ weights.T + bias), computed in tiles.
class Product {
  public:
    Product(const PackedLinear& weights, Activations activations, int64_t rows, Epilogue epilogue, DType out_dtype,
            void* out, const GatedActivation& gated = kSilu);

    void run() const;  // on all threads

    void run_panels(int64_t begin, int64_t end) const;  // on this thread

  private:
    struct Schedule {
        int64_t rows;         // per tile
        int64_t piece_bytes;  // of a panel, which all rows use before the next piece is touched
        int64_t ahead_bytes;  // fetched meanwhile
    };

    bool has_blocks() const { return kernel_.block_steps > 1; }
    Schedule schedule() const;
    void run_tile(const Tile& tile, const Schedule& plan) const;
    void multiply(const Tile& block, int64_t k, int64_t steps, float* sums, Prefetch ahead) const;
    Prefetch prefetch(int64_t block, int64_t num_blocks, int64_t bytes) const;
    void finish(const Tile& tile, const float* sums) const;

    const PackedLinear& weights_;
    const GemmKernel& kernel_;
    Activations activations_;
    int64_t rows_;
    int64_t step_bytes_;
    Finish finish_;
    GatedActivation gated_;
    char* out_;
    int64_t out_item_;
    int64_t out_stride_;
};

}  // namespace swiftkv
