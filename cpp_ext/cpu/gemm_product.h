#pragma once

#include <cstdint>

#include "gemm_activations.h"

namespace swiftkv {

// The most rows of a tile: as many as stay in the second-level cache while panels pass.
int64_t rows_per_tile(const PackedLinear& weights, Activations activations);

// Blocks of rows against panels.
struct Tile {
    int64_t panel_begin;
    int64_t panel_end;
    int64_t block_begin;
    int64_t block_end;
};

// The layout of results: contiguous rows, or interleaved rows, as activations of the next product (see Activations). A
// cache line then holds the results of one or more panels.
enum class ResultRows { kWhole, kInterleaved };

// out[rows, outputs] (+)= epilogue(activations[rows, in_features] @ weights.T + bias), computed in tiles.
class Product {
  public:
    Product(const PackedLinear& weights, Activations activations, int64_t rows, Epilogue epilogue, DType out_dtype,
            void* out, const GatedActivation& gated = kSilu, ResultRows result_rows = ResultRows::kWhole);

    void run() const;  // on all threads

    void run_panels(int64_t begin, int64_t end) const;  // on this thread

  private:
    struct Schedule {
        int64_t tile_blocks;
        int64_t piece_bytes;      // a piece of a panel: all rows use it before the next piece is touched
        int64_t ahead_bytes;      // the bytes fetched ahead
        int64_t line_panels = 0;  // panels whose results are written past the caches together; 0: none are
    };

    bool has_blocks() const { return kernel_.block_steps > 1; }
    Schedule schedule() const;
    int64_t line_panels() const;
    void run_tile(const Tile& tile, const Schedule& plan) const;
    void multiply(const char* weights, int64_t block, int64_t k, int64_t steps, float* sums, Prefetch ahead) const;
    Prefetch prefetch(int64_t i, int64_t num_blocks, int64_t bytes) const;
    void finish(int64_t panel, int64_t block, const float* sums) const;
    void finish_past_caches(const Tile& tile, int64_t block, const float* sums, int64_t panel_sums) const;
    void finish_in(int64_t panel, int64_t block, const float* sums, char* out, int64_t out_stride) const;
    char* result(int64_t panel, int64_t block) const;
    void leave() const;

    const PackedLinear& weights_;
    const GemmKernel& kernel_;
    Activations activations_;
    RowBlocks blocks_;
    int64_t step_bytes_;
    Finish finish_;
    GatedActivation gated_;
    char* out_;
    int64_t out_item_;
    int64_t out_stride_;
    bool adds_;         // results are added to what `out` holds
    bool interleaves_;  // results are interleaved
};

}  // namespace swiftkv
