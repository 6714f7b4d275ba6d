#include "gemm.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "scratch.h"
#include "thread_pool.h"

namespace swiftkv {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kMinRows = 64;  // of a tile, where there are many
constexpr int64_t kMaxRows = 192;
constexpr int64_t kMaxWidth = 64;  // of a panel

// Measured sizes, for a first-level cache of 32 to 48 KiB, a second-level cache of 1 to 2 MiB.
constexpr int64_t kStreamedRows = 96;         // with more, arithmetic takes longer than memory
constexpr int64_t kStreamedPiece = 16 << 10;  // bytes
constexpr int64_t kReusedPiece = 256 << 10;
constexpr int64_t kResidentActivations = 384 << 10;

int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// Rows of activations as a kernel reads them.
struct Activations {
    const char* data;
    int64_t stride_bytes;
};

// The number of rows in a chunk of a few microseconds of work.
int64_t row_grain(int64_t row_elements) {
    return std::max<int64_t>(1, 16384 / row_elements);
}

// Returns `x`, or a copy that is normalised, widened to float32 or padded to a multiple of `k_multiple` as required.
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
                    elementwise.rms_norm_widen[dtype](in, norm->weight, norm->eps, k, reinterpret_cast<float*>(row));
                else if (norm)
                    elementwise.rms_norm[dtype](in, norm->weight, norm->eps, k, row);
                else if (widen)
                    elementwise.widen[dtype](in, k, reinterpret_cast<float*>(row));
                else
                    std::memcpy(row, in, x_stride);
            }
        },
        row_grain(k));
    return {out, stride};
}

// Rows of the activations against one panel.
struct Tile {
    int64_t panel;
    int64_t row_begin;
    int64_t row_end;

    int64_t rows() const { return row_end - row_begin; }
};

class Product {
  public:
    Product(const PackedLinear& weights, Activations activations, int64_t rows, Epilogue epilogue, DType out_dtype,
            void* out)
        : weights_(weights),
          kernel_(weights.kernel()),
          activations_(activations),
          rows_(rows),
          step_bytes_(weights.panel_bytes() / weights.k_steps()),
          finish_(elementwise_kernels(active_isa()).finish[static_cast<int>(epilogue)][static_cast<int>(out_dtype)]),
          out_(static_cast<char*>(out)),
          out_item_(item_size(out_dtype)),
          out_stride_(weights.num_outputs() * out_item_) {}

    void run() const {
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
            std::max<int64_t>(1, num_panels / (2 * num_threads())));  // long runs, yet a late thread can be helped
    }

  private:
    struct Schedule {
        int64_t rows;         // per tile
        int64_t piece_bytes;  // of a panel, which all rows use before the next piece is touched
        int64_t ahead_bytes;  // fetched meanwhile
    };

    // With few rows, memory takes the time; a piece passes through the first-level cache. With many, as many as fit
    // stay in the second-level cache while the panels pass, and so does the piece.
    Schedule schedule() const {
        const int64_t block = kernel_.max_rows;
        const int64_t num_blocks = ceil_div(rows_, block);
        if (num_blocks <= 2) return {rows_, kStreamedPiece, 6 << 10};
        if (num_blocks == 3) return {rows_, kStreamedPiece, kStreamedPiece};
        if (rows_ <= kStreamedRows) return {rows_, kStreamedPiece, 2 * kStreamedPiece};
        const int64_t fitting = kResidentActivations / activations_.stride_bytes;
        return {std::clamp(fitting, kMinRows, kMaxRows) / block * block, kReusedPiece, kReusedPiece};
    }

    void run_tile(const Tile& tile, const Schedule& plan) const {
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

    void multiply(const Tile& block, int64_t k, int64_t steps, float* sums, Prefetch ahead) const {
        const int64_t a_step_bytes = kernel_.k_step * (kernel_.widen_activations ? 4 : item_size(weights_.dtype()));
        kernel_.multiply(static_cast<int>(block.rows()),
                         activations_.data + block.row_begin * activations_.stride_bytes + k * a_step_bytes,
                         activations_.stride_bytes, weights_.panel(block.panel) + k * step_bytes_, steps, k == 0, sums,
                         ahead);
    }

    // With one or two blocks of rows the first fetches for both: it waits for memory anyway. With more, memory would
    // idle while the others multiply, so each fetches a share.
    Prefetch prefetch(int64_t block, int64_t num_blocks, int64_t bytes) const {
        using Lines = Prefetch::Lines;
        if (num_blocks <= 2) return block == 0 ? Prefetch{Lines::kAll, bytes} : Prefetch{};
        if (num_blocks == 3 && block == 0) return {Lines::kTwo, bytes};
        const int64_t line = num_blocks == 3 ? block + 1 : block;
        if (line * kCacheLine >= step_bytes_) return {};
        return {Lines::kOne, bytes + line * kCacheLine};
    }

    void finish(const Tile& tile, const float* sums) const {
        const int64_t column = tile.panel * weights_.panel_outputs();
        finish_(sums, tile.row_end - tile.row_begin, weights_.panel_bias(tile.panel), kernel_.panel_width,
                std::min(weights_.panel_outputs(), weights_.num_outputs() - column),
                out_ + tile.row_begin * out_stride_ + column * out_item_, out_stride_);
    }

    const PackedLinear& weights_;
    const GemmKernel& kernel_;
    Activations activations_;
    int64_t rows_;
    int64_t step_bytes_;
    void (*finish_)(const float*, int64_t, const float*, int64_t, int64_t, void*, int64_t);
    char* out_;
    int64_t out_item_;
    int64_t out_stride_;
};

}  // namespace

void linear(const PackedLinear& weights, const void* x, int64_t rows, std::optional<RmsNorm> norm, Epilogue epilogue,
            DType out_dtype, void* out) {
    if (rows > 0) Product(weights, prepare(weights, x, rows, norm), rows, epilogue, out_dtype, out).run();
}

void rms_norm(const void* x, int64_t rows, int64_t k, RmsNorm norm, DType dtype, void* out) {
    const auto kernel = elementwise_kernels(active_isa()).rms_norm[static_cast<int>(dtype)];
    const int64_t stride = k * item_size(dtype);
    parallel_for(
        rows,
        [&](int64_t begin, int64_t end, int) {
            for (int64_t r = begin; r < end; ++r)
                kernel(static_cast<const char*>(x) + r * stride, norm.weight, norm.eps, k,
                       static_cast<char*>(out) + r * stride);
        },
        row_grain(k));
}

void embed(const int32_t* ids, int64_t count, const void* table, int64_t vocab_size, int64_t row_bytes, void* out) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= vocab_size)
            throw std::out_of_range("token id " + std::to_string(ids[i]) + " is outside the vocabulary of " +
                                    std::to_string(vocab_size));
    parallel_for(
        count,
        [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i)
                std::memcpy(static_cast<char*>(out) + i * row_bytes,
                            static_cast<const char*>(table) + ids[i] * row_bytes, row_bytes);
        },
        row_grain(row_bytes));
}

}  // namespace swiftkv
