#include "gemm_activations.h"

#include <algorithm>
#include <cstring>

#include "scratch.h"
#include "thread_pool.h"

namespace swiftkv {
namespace {

constexpr int64_t kCacheLine = 64;

// Makes rows of activations in the form that a kernel needs.
class RowMaker {
  public:
    RowMaker(const PackedLinear& weights, const void* x, const std::optional<RmsNorm>& norm)
        : elementwise_(elementwise_kernels(active_isa())),
          norm_(norm),
          widen_(weights.kernel().widen_activations),
          dtype_(static_cast<int>(weights.dtype())),
          k_(weights.in_features()),
          element_bytes_(widen_ ? 4 : item_size(weights.dtype())),
          row_bytes_(weights.k_steps() * weights.kernel().k_step * element_bytes_),
          x_(static_cast<const char*>(x)),
          x_row_bytes_(k_ * item_size(weights.dtype())) {}

    bool changes_rows() const { return norm_ || widen_ || padding_bytes() > 0; }
    int64_t row_bytes() const { return row_bytes_; }

    void make(int64_t i, char* row) const {
        const char* in = x_ + i * x_row_bytes_;
        std::memset(row + row_bytes_ - padding_bytes(), 0, padding_bytes());
        if (norm_ && widen_)
            elementwise_.rms_norm_widen[static_cast<int>(norm_->kind)][dtype_](in, norm_->weight, norm_->eps, k_,
                                                                               reinterpret_cast<float*>(row));
        else if (norm_)
            elementwise_.rms_norm[static_cast<int>(norm_->kind)][dtype_](in, norm_->weight, norm_->eps, k_, row);
        else if (widen_)
            elementwise_.widen[dtype_](in, k_, reinterpret_cast<float*>(row));
        else
            std::memcpy(row, in, x_row_bytes_);
    }

  private:
    int64_t padding_bytes() const { return row_bytes_ - k_ * element_bytes_; }

    const ElementwiseKernels& elementwise_;
    const std::optional<RmsNorm>& norm_;
    bool widen_;
    int dtype_;
    int64_t k_;
    int64_t element_bytes_;
    int64_t row_bytes_;
    const char* x_;
    int64_t x_row_bytes_;
};

// Writes the i-th row, line by line, to its places among the rows of its block.
void interleave(const char* row, int64_t i, int64_t row_bytes, const RowBlocks& blocks, char* out) {
    const int64_t block = blocks.of(i);
    const int64_t begin = blocks.begin(block);
    const int64_t rows = blocks.begin(block + 1) - begin;
    char* line = out + begin * row_bytes + (i - begin) * kCacheLine;
    for (int64_t from = 0; from < row_bytes; from += kCacheLine, line += rows * kCacheLine)
        std::memcpy(line, row + from, kCacheLine);
}

char* whole_row(int64_t bytes) {
    thread_local Scratch scratch;
    return reinterpret_cast<char*>(scratch.reserve(bytes));
}

}  // namespace

int64_t row_grain(int64_t row_elements) {
    return std::max<int64_t>(1, 16384 / row_elements);
}

RowBlocks::RowBlocks(const GemmKernel& kernel, int64_t num_rows)
    : rows(num_rows), count((num_rows + kernel.max_rows - 1) / kernel.max_rows) {}

bool takes_interleaved(const PackedLinear& weights) {
    return weights.kernel().interleave_rows && weights.in_features() * item_size(weights.dtype()) % kCacheLine == 0;
}

Activations prepare(const PackedLinear& weights, const void* x, int64_t rows, const std::optional<RmsNorm>& norm) {
    const RowMaker maker(weights, x, norm);
    const int64_t row_bytes = maker.row_bytes();
    if (!maker.changes_rows()) return {static_cast<const char*>(x), row_bytes};
    thread_local Scratch scratch;
    char* out = reinterpret_cast<char*>(scratch.reserve(rows * row_bytes));
    const bool interleaved = norm && weights.kernel().interleave_rows && rows > 1;
    const RowBlocks blocks(weights.kernel(), rows);
    parallel_for(
        rows,
        [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) {
                char* row = interleaved ? whole_row(row_bytes) : out + i * row_bytes;
                maker.make(i, row);
                if (interleaved) interleave(row, i, row_bytes, blocks, out);
            }
        },
        row_grain(weights.in_features()));
    return {out, row_bytes, interleaved};
}

}  // namespace swiftkv
