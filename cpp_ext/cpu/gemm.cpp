#include "gemm.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "thread_pool.h"

namespace swiftkv {
namespace {

int64_t tune(const char* name, int64_t other) {
    const char* v = getenv(name);
    return v ? atol(v) : other;
}
const int64_t kDecodeRows = tune("T_DROWS", 32);
const int64_t kDecodeSteps = tune("T_DSTEPS", 64);
const int64_t kDecodePrefetch = tune("T_DPF", 4096);
const int64_t kPrefillSteps = tune("T_PSTEPS", 1 << 30);
const int64_t kPrefillGroup = tune("T_PGROUP", 6);
const int64_t kPrefillChunk = tune("T_PCHUNK", 96);
const int64_t kPrefillNext = tune("T_PNEXT", 1);

constexpr int64_t kCacheLine = 64;
constexpr int64_t kMaxSums = 96 * 64;

// Rows of activations as a kernel reads them.
struct Activations {
    const char* data;
    int64_t stride_bytes;
};

// One thread's working memory between calls: grows, never shrinks.
class Scratch {
  public:
    char* reserve(int64_t bytes) {
        if (bytes > capacity_) {
            data_.reset(static_cast<char*>(::operator new(bytes, std::align_val_t{kCacheLine})));
            capacity_ = bytes;
        }
        return data_.get();
    }

  private:
    struct Free {
        void operator()(char* p) const { ::operator delete(p, std::align_val_t{kCacheLine}); }
    };
    std::unique_ptr<char, Free> data_;
    int64_t capacity_ = 0;
};

// A few microseconds of work per chunk of rows.
int64_t row_grain(int64_t row_elements) {
    return std::max<int64_t>(1, 16384 / row_elements);
}

// Normalised, widened to float32 or padded to whole steps of k, where the kernel asks for it.
Activations prepare(const PackedLinear& weights, const void* x, int64_t rows, const std::optional<RmsNorm>& norm) {
    const GemmKernel& kernel = weights.kernel();
    const auto dtype = static_cast<int>(weights.dtype());
    const int64_t k = weights.in_features();
    const int64_t x_stride = k * item_size(weights.dtype());
    const auto* source = static_cast<const char*>(x);
    const bool widen = kernel.widen_activations;
    const bool padded = k % kernel.k_step != 0;
    if (!norm && !widen && !padded) return {source, x_stride};

    thread_local Scratch scratch;
    const int64_t element_bytes = widen ? 4 : item_size(weights.dtype());
    const int64_t stride = weights.k_steps() * kernel.k_step * element_bytes;
    char* out = scratch.reserve(rows * stride);
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

// What one thread does at a time: some rows against one panel.
struct Tile {
    int64_t panel;
    int64_t row_begin;
    int64_t row_end;
};

class Product {
  public:
    Product(const PackedLinear& weights, Activations activations, int64_t rows, Epilogue epilogue, DType out_dtype,
            void* out)
        : weights_(weights),
          kernel_(weights.kernel()),
          activations_(activations),
          rows_(rows),
          finish_(elementwise_kernels(active_isa()).finish[static_cast<int>(epilogue)][static_cast<int>(out_dtype)]),
          out_(static_cast<char*>(out)),
          out_item_(item_size(out_dtype)) {}

    void run() {
        const bool few = rows_ <= kDecodeRows;
        const int64_t chunk = few ? rows_ : kPrefillChunk;
        const int64_t row_chunks = (rows_ + chunk - 1) / chunk;
        parallel_for(weights_.num_panels() * row_chunks, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t row = i % row_chunks * chunk;
                const Tile tile{i / row_chunks, row, std::min(row + chunk, rows_)};
                if (few)
                    stream(tile);
                else
                    reuse(tile);
            }
        });
    }

  private:
    // Few rows: the panel comes from memory, once, in pieces that all rows use while they are in the first-level cache.
    void stream(const Tile& tile) { group(tile, kDecodeSteps, kDecodePrefetch); }

    // Many rows: the panel stays in the second-level cache, and the next one is fetched meanwhile.
    void reuse(const Tile& tile) {
        for (int64_t row = tile.row_begin; row < tile.row_end; row += kPrefillGroup) {
            const Tile part{tile.panel, row, std::min(row + kPrefillGroup, tile.row_end)};
            if (kPrefillNext) prefetch_next(part);
            group(part, kPrefillSteps, 0);
        }
    }

    void group(const Tile& tile, int64_t steps_per_piece, int64_t prefetch_bytes) {
        alignas(kCacheLine) float sums[kMaxSums];
        const int64_t rows = tile.row_end - tile.row_begin;
        const int64_t num_blocks = (rows + kernel_.max_rows - 1) / kernel_.max_rows;
        const int64_t step_bytes = weights_.panel_bytes() / weights_.k_steps();
        const int64_t a_step_bytes = kernel_.k_step * (kernel_.widen_activations ? 4 : item_size(weights_.dtype()));
        for (int64_t k = 0; k < weights_.k_steps(); k += steps_per_piece) {
            const int64_t steps = std::min(steps_per_piece, weights_.k_steps() - k);
            for (int64_t block = 0; block < num_blocks; ++block) {
                const int64_t begin = block * rows / num_blocks;
                const int64_t end = (block + 1) * rows / num_blocks;
                kernel_.multiply(
                    static_cast<int>(end - begin),
                    activations_.data + (tile.row_begin + begin) * activations_.stride_bytes + k * a_step_bytes,
                    activations_.stride_bytes, weights_.panel(tile.panel) + k * step_bytes, steps, k == 0,
                    sums + begin * kernel_.panel_width, block == 0 ? prefetch_bytes : 0);
            }
        }
        for (int64_t r = 0; r < rows; ++r) finish_row(tile, tile.row_begin + r, sums + r * kernel_.panel_width);
    }

    void finish_row(const Tile& tile, int64_t row, const float* sums) {
        const int64_t column = tile.panel * weights_.panel_outputs();
        finish_(sums, weights_.panel_bias(tile.panel), kernel_.panel_width,
                std::min(weights_.panel_outputs(), weights_.num_outputs() - column),
                out_ + (row * weights_.num_outputs() + column) * out_item_);
    }

    // The share of the next panel that these rows are of all rows.
    void prefetch_next(const Tile& tile) {
        if (tile.panel + 1 == weights_.num_panels()) return;
        const char* next = weights_.panel(tile.panel + 1);
        const int64_t lines = weights_.panel_bytes() / kCacheLine;
        for (int64_t line = tile.row_begin * lines / rows_; line < tile.row_end * lines / rows_; ++line)
            __builtin_prefetch(next + line * kCacheLine, 0, 2);
    }

    const PackedLinear& weights_;
    const GemmKernel& kernel_;
    Activations activations_;
    int64_t rows_;
    void (*finish_)(const float*, const float*, int64_t, int64_t, void*);
    char* out_;
    int64_t out_item_;
};

}  // namespace

void linear(const PackedLinear& weights, const void* x, int64_t rows, std::optional<RmsNorm> norm, Epilogue epilogue,
            DType out_dtype, void* out) {
    Product(weights, prepare(weights, x, rows, norm), rows, epilogue, out_dtype, out).run();
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
