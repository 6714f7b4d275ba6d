#include "gemm_product.h"

#include <algorithm>
#include <cstring>

#include "scratch.h"
#include "thread_pool.h"

namespace swiftkv {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kMinRows = 64;  // of a tile, where there are many
constexpr int64_t kMaxRows = 512;
constexpr int64_t kMaxWidth = 64;  // of a panel
// Long runs of panels, yet a late thread can be helped: with two, a row's product lost a tenth to it.
constexpr int64_t kChunksPerThread = 8;

// Measured sizes, for a first-level cache of 32 to 48 KiB, a second-level cache of 1 to 2 MiB.
constexpr int64_t kStreamedRows = 96;         // with more, arithmetic takes longer than memory
constexpr int64_t kStreamedPiece = 16 << 10;  // bytes
constexpr int64_t kStepsAhead = 6 << 10;      // bytes, where a kernel's blocks are steps
constexpr int64_t kBlocksAhead = 1 << 10;     // bytes

int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

}  // namespace

int64_t row_grain(int64_t row_elements) {
    return std::max<int64_t>(1, 16384 / row_elements);
}

Activations prepare(const PackedLinear& weights, const void* x, int64_t rows, const std::optional<RmsNorm>& norm) {
    const GemmKernel& kernel = weights.kernel();
    const auto dtype = static_cast<int>(weights.dtype());
    const int64_t k = weights.in_features();
    const int64_t x_stride = k * item_size(weights.dtype());
    const auto* source = static_cast<const char*>(x);
    const bool widen = kernel.widen_activations;
    const bool padded = k % kernel.k_multiple != 0;
    if (!norm && !widen && !padded) return {source, x_stride};

    thread_local Scratch scratch;
    const int64_t element_bytes = widen ? 4 : item_size(weights.dtype());
    const int64_t stride = weights.k_steps() * kernel.k_step * element_bytes;
    char* out = reinterpret_cast<char*>(scratch.reserve(rows * stride));
    const ElementwiseKernels& elementwise = elementwise_kernels(active_isa());
    parallel_for(
        rows,
        [&](int64_t begin, int64_t end, int) {
            for (int64_t r = begin; r < end; ++r) {
                const char* in = source + r * x_stride;
                char* row = out + r * stride;
                if (padded) std::memset(row + k * element_bytes, 0, stride - k * element_bytes);
                if (norm && widen)
                    elementwise.rms_norm_widen[static_cast<int>(norm->kind)][dtype](in, norm->weight, norm->eps, k,
                                                                                    reinterpret_cast<float*>(row));
                else if (norm)
                    elementwise.rms_norm[static_cast<int>(norm->kind)][dtype](in, norm->weight, norm->eps, k, row);
                else if (widen)
                    elementwise.widen[dtype](in, k, reinterpret_cast<float*>(row));
                else
                    std::memcpy(row, in, x_stride);
            }
        },
        row_grain(k));
    return {out, stride};
}

int64_t rows_per_tile(const PackedLinear& weights, Activations activations) {
    const Blocking& blocking = weights.kernel().blocking;
    const int64_t fitting = blocking.resident_bytes / activations.stride_bytes;
    const int64_t block = weights.kernel().max_rows;
    return std::clamp(fitting, kMinRows, std::min(blocking.max_rows, kMaxRows)) / block * block;
}

Product::Product(const PackedLinear& weights, Activations activations, int64_t rows, Epilogue epilogue, DType out_dtype,
                 void* out, const GatedActivation& gated)
    : weights_(weights),
      kernel_(weights.kernel()),
      activations_(activations),
      rows_(rows),
      step_bytes_(weights.panel_bytes() / weights.k_steps()),
      finish_(elementwise_kernels(active_isa()).finish[static_cast<int>(epilogue)][static_cast<int>(out_dtype)]),
      gated_(gated),
      out_(static_cast<char*>(out)),
      out_item_(item_size(out_dtype)),
      out_stride_(weights.num_outputs() * out_item_) {}

void Product::run() const {
    const Schedule plan = schedule();
    const int64_t num_panels = weights_.num_panels();
    const int64_t num_tiles = ceil_div(rows_, plan.rows) * num_panels;
    parallel_for(
        num_tiles,
        [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t row = i / num_panels * plan.rows;
                run_tile({i % num_panels, row, std::min(row + plan.rows, rows_)}, plan);
            }
            if (kernel_.release != nullptr) kernel_.release();
        },
        std::max<int64_t>(1, num_panels / (kChunksPerThread * num_threads())));
}

void Product::run_panels(int64_t begin, int64_t end) const {
    const Schedule plan = schedule();
    for (int64_t row = 0; row < rows_; row += plan.rows)
        for (int64_t panel = begin; panel < end; ++panel)
            run_tile({panel, row, std::min(row + plan.rows, rows_)}, plan);
    if (kernel_.release != nullptr) kernel_.release();
}

// With few rows, memory takes the time; a piece passes through the first-level cache, and one block of rows needs no
// pieces. With many, as many as fit stay in the second-level cache while the panels pass. Blocks of weights lie in the
// order in which they are read, so that the processor fetches them by itself, and pieces gain nothing for two.
Product::Schedule Product::schedule() const {
    const int64_t num_blocks = ceil_div(rows_, kernel_.max_rows);
    const int64_t piece = kernel_.blocking.piece_bytes;
    const Schedule many{rows_per_tile(weights_, activations_), piece, piece};
    if (has_blocks()) return num_blocks <= 2 ? Schedule{rows_, weights_.panel_bytes(), kBlocksAhead} : many;
    if (num_blocks == 1) return {rows_, weights_.panel_bytes(), kStepsAhead};
    if (num_blocks == 2) return {rows_, kStreamedPiece, kStepsAhead};
    if (num_blocks == 3) return {rows_, kStreamedPiece, kStreamedPiece};
    return rows_ <= kStreamedRows ? Schedule{rows_, kStreamedPiece, 2 * kStreamedPiece} : many;
}

void Product::run_tile(const Tile& tile, const Schedule& plan) const {
    alignas(kCacheLine) float sums[kMaxRows * kMaxWidth];
    const int64_t num_blocks = ceil_div(tile.rows(), kernel_.max_rows);
    const int64_t piece = plan.piece_bytes / step_bytes_;
    for (int64_t k = 0; k < weights_.k_steps(); k += piece) {
        const int64_t steps = std::min(piece, weights_.k_steps() - k);
        for (int64_t i = 0; i < num_blocks; ++i) {
            const int64_t begin = i * tile.rows() / num_blocks;
            const int64_t end = (i + 1) * tile.rows() / num_blocks;
            const Tile block{tile.panel, tile.row_begin + begin, tile.row_begin + end};
            float* block_sums = sums + begin * kernel_.panel_width;
            multiply(block, k, steps, block_sums, prefetch(i, num_blocks, plan.ahead_bytes));
            if (k + steps == weights_.k_steps()) finish(block, block_sums);
        }
    }
}

void Product::multiply(const Tile& block, int64_t k, int64_t steps, float* sums, Prefetch ahead) const {
    const int64_t a_step_bytes = kernel_.k_step * (kernel_.widen_activations ? 4 : item_size(weights_.dtype()));
    kernel_.multiply(static_cast<int>(block.rows()),
                     activations_.data + block.row_begin * activations_.stride_bytes + k * a_step_bytes,
                     activations_.stride_bytes, weights_.panel(block.panel) + k * step_bytes_, steps, k == 0, sums,
                     ahead);
}

// With one or two blocks of rows the first fetches for both: it waits for memory anyway. With more, memory would
// idle while the others multiply, so each fetches a share.
Prefetch Product::prefetch(int64_t block, int64_t num_blocks, int64_t bytes) const {
    if (num_blocks <= 2) return block == 0 ? Prefetch{Prefetch::kAll, bytes} : Prefetch{};
    const int64_t lines = step_bytes_ * kernel_.block_steps / kCacheLine;
    if (has_blocks()) {
        const int64_t begin = block * lines / num_blocks;
        const int64_t end = (block + 1) * lines / num_blocks;
        return {static_cast<int>(end - begin), bytes + begin * kCacheLine};
    }
    if (num_blocks == 3 && block == 0) return {2, bytes};
    const int64_t line = num_blocks == 3 ? block + 1 : block;
    if (line >= lines) return {};
    return {1, bytes + line * kCacheLine};
}

void Product::finish(const Tile& tile, const float* sums) const {
    const int64_t column = tile.panel * weights_.panel_outputs();
    finish_(sums, tile.row_end - tile.row_begin, weights_.panel_bias(tile.panel), kernel_.panel_width,
            std::min(weights_.panel_outputs(), weights_.num_outputs() - column), gated_,
            out_ + tile.row_begin * out_stride_ + column * out_item_, out_stride_);
}

}  // namespace swiftkv
