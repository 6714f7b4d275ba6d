#include "gemm_product.h"

#include <immintrin.h>

#include <algorithm>

#include "thread_pool.h"

namespace swiftkv {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kMinRows = 64;  // the fewest rows of a tile if there are many
constexpr int64_t kMaxRows = 512;
constexpr int64_t kMaxWidth = 64;  // the widest panel
// Runs of panels are long, but short enough that others can help a late thread: with two runs per thread, the product
// of one row lost a tenth to it.
constexpr int64_t kChunksPerThread = 8;

// Measured sizes, for a first-level cache of 32 to 48 KiB, a second-level cache of 1 to 2 MiB.
constexpr int64_t kStreamedRows = 96;         // with more, arithmetic takes longer than memory
constexpr int64_t kStreamedPiece = 16 << 10;  // bytes
constexpr int64_t kStepsAhead = 6 << 10;      // bytes, if a kernel's blocks are steps
// If blocks of weights lie in the order in which they are read, the processor fetches by itself too, and with pieces
// this small it goes on while the first-level cache serves the other blocks of rows.
constexpr int64_t kFewBlocks = 3;             // blocks of rows
constexpr int64_t kFewBlocksPiece = 8 << 10;  // bytes
constexpr int64_t kFewBlocksAhead = 512;      // bytes
constexpr int64_t kBlockAhead = 1 << 10;      // bytes, if there is one block of rows

// Unpacked weights stay in the first-level cache until all rows of a tile have used them.
constexpr int64_t kUnpackedPiece = WeightCodes::kMaxGroup * kMaxWidth * 2;  // bytes

constexpr int64_t kBypassRows = 32;    // rows of a block
constexpr int64_t kBypassWidth = 128;  // bytes

int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

}  // namespace

int64_t rows_per_tile(const PackedLinear& weights, Activations activations) {
    const Blocking& blocking = weights.kernel().blocking;
    const int64_t fitting = blocking.resident_bytes / activations.stride_bytes;
    const int64_t block = weights.kernel().max_rows;
    return std::clamp(fitting, kMinRows, std::min(blocking.max_rows, kMaxRows)) / block * block;
}

Product::Product(const PackedLinear& weights, Activations activations, int64_t rows, Epilogue epilogue, DType out_dtype,
                 void* out, const GatedActivation& gated, ResultRows result_rows)
    : weights_(weights),
      kernel_(weights.kernel()),
      activations_(activations),
      blocks_(kernel_, rows),
      step_bytes_(weights.step_bytes()),
      finish_(elementwise_kernels(active_isa()).finish[static_cast<int>(epilogue)][static_cast<int>(out_dtype)]),
      gated_(gated),
      out_(static_cast<char*>(out)),
      out_item_(item_size(out_dtype)),
      out_stride_(weights.num_outputs() * out_item_),
      adds_(epilogue == Epilogue::kResidual),
      interleaves_(result_rows == ResultRows::kInterleaved) {}

void Product::run() const {
    const Schedule plan = schedule();
    const int64_t tile_panels = std::max<int64_t>(1, plan.line_panels);
    const int64_t num_columns = weights_.num_panels() / tile_panels;
    const int64_t num_tiles = ceil_div(blocks_.count, plan.tile_blocks) * num_columns;
    parallel_for(
        num_tiles,
        [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t panel = i % num_columns * tile_panels;
                const int64_t block = i / num_columns * plan.tile_blocks;
                run_tile({panel, panel + tile_panels, block, std::min(block + plan.tile_blocks, blocks_.count)}, plan);
            }
            leave();
        },
        std::max<int64_t>(1, num_columns / (kChunksPerThread * num_threads())));
}

void Product::run_panels(int64_t begin, int64_t end) const {
    Schedule plan = schedule();
    plan.line_panels = 0;
    for (int64_t block = 0; block < blocks_.count; block += plan.tile_blocks)
        for (int64_t panel = begin; panel < end; ++panel)
            run_tile({panel, panel + 1, block, std::min(block + plan.tile_blocks, blocks_.count)}, plan);
    leave();
}

// Makes results that were written past the caches visible to other threads.
void Product::leave() const {
    _mm_sfence();
    if (kernel_.release != nullptr) kernel_.release();
}

// With few rows, memory takes the time: pieces pass through the first-level cache, and a single block of rows needs no
// pieces. With many rows, as many as fit stay in the second-level cache while the panels pass.
Product::Schedule Product::schedule() const {
    const int64_t all = blocks_.count;
    const Blocking& blocking = kernel_.blocking;
    const int64_t piece = activations_.interleaved ? blocking.interleaved_piece_bytes : blocking.piece_bytes;
    const Schedule many{rows_per_tile(weights_, activations_) / kernel_.max_rows, piece, piece, line_panels()};
    if (all == 1) return {all, weights_.k_steps() * step_bytes_, has_blocks() ? kBlockAhead : kStepsAhead};
    if (has_blocks()) return all <= kFewBlocks ? Schedule{all, kFewBlocksPiece, kFewBlocksAhead} : many;
    if (all == 2) return {all, kStreamedPiece, kStepsAhead};
    if (all == 3) return {all, kStreamedPiece, kStreamedPiece};
    return blocks_.rows <= kStreamedRows ? Schedule{all, kStreamedPiece, 2 * kStreamedPiece} : many;
}

// Returns the number of panels whose results are written together past the caches. Results that fit no cache are
// written so, because a line would come from memory only to be overwritten. Such writes must be whole lines, so one or
// two panels are finished together.
int64_t Product::line_panels() const {
    const int64_t least = kernel_.blocking.bypass_bytes;
    const int64_t width = weights_.panel_outputs() * out_item_;
    const bool large = least > 0 && blocks_.rows * out_stride_ >= least;
    const bool in_lines = reinterpret_cast<uintptr_t>(out_) % kCacheLine == 0 && out_stride_ % kCacheLine == 0;
    if (!large || adds_ || interleaves_ || !in_lines || weights_.num_outputs() % weights_.panel_outputs() != 0)
        return 0;
    if (width % kCacheLine == 0 && width <= kBypassWidth) return 1;
    return 2 * width == kCacheLine && weights_.num_panels() % 2 == 0 ? 2 : 0;
}

void Product::run_tile(const Tile& tile, const Schedule& plan) const {
    alignas(kCacheLine) float sums[kMaxRows * kMaxWidth];
    const int64_t num_blocks = tile.block_end - tile.block_begin;
    const int64_t block_sums = kernel_.max_rows * kernel_.panel_width;
    const int64_t panel_sums = num_blocks * block_sums;
    alignas(kCacheLine) char unpacked[kUnpackedPiece];
    const bool unpacks = !weights_.is_unpacked();
    const int64_t piece =
        unpacks ? weights_.unpackable_steps(kUnpackedPiece / step_bytes_) : plan.piece_bytes / step_bytes_;
    for (int64_t panel = tile.panel_begin; panel < tile.panel_end; ++panel)
        for (int64_t k = 0; k < weights_.k_steps(); k += piece) {
            const int64_t steps = std::min(piece, weights_.k_steps() - k);
            const bool complete = k + steps == weights_.k_steps();
            if (unpacks) weights_.unpack(panel, k, steps, unpacked);
            const char* weights = unpacks ? unpacked : weights_.steps(panel, k);
            for (int64_t i = 0; i < num_blocks; ++i) {
                float* first_sums = sums + i * block_sums;
                multiply(weights, tile.block_begin + i, k, steps, first_sums + (panel - tile.panel_begin) * panel_sums,
                         unpacks ? Prefetch{} : prefetch(i, num_blocks, plan.ahead_bytes));
                if (complete && plan.line_panels == 0) finish(panel, tile.block_begin + i, first_sums);
            }
        }
    if (plan.line_panels > 0)
        for (int64_t i = 0; i < num_blocks; ++i)
            finish_past_caches(tile, tile.block_begin + i, sums + i * block_sums, panel_sums);
}

void Product::multiply(const char* weights, int64_t block, int64_t k, int64_t steps, float* sums,
                       Prefetch ahead) const {
    const int64_t rows = blocks_.size(block);
    const bool interleaved = activations_.interleaved;
    const int64_t step_bytes = kernel_.k_step * (kernel_.widen_activations ? 4 : item_size(weights_.dtype()));
    kernel_.multiply(static_cast<int>(rows),
                     activations_.data + blocks_.begin(block) * activations_.stride_bytes +
                         k * step_bytes * (interleaved ? rows : 1),
                     interleaved ? kCacheLine : activations_.stride_bytes, weights, steps, k == 0, sums, ahead);
}

// With few blocks of rows, the first fetches for all: it waits for memory anyway. With more, memory would be idle while
// the others multiply, so each block fetches a share.
Prefetch Product::prefetch(int64_t i, int64_t num_blocks, int64_t bytes) const {
    if (num_blocks <= (has_blocks() ? kFewBlocks : 2)) return i == 0 ? Prefetch{Prefetch::kAll, bytes} : Prefetch{};
    const int64_t lines = step_bytes_ * kernel_.block_steps / kCacheLine;
    if (has_blocks()) {
        const int64_t begin = i * lines / num_blocks;
        const int64_t end = (i + 1) * lines / num_blocks;
        return {static_cast<int>(end - begin), bytes + begin * kCacheLine};
    }
    if (num_blocks == 3 && i == 0) return {2, bytes};
    const int64_t line = num_blocks == 3 ? i + 1 : i;
    if (line >= lines) return {};
    return {1, bytes + line * kCacheLine};
}

void Product::finish(int64_t panel, int64_t block, const float* sums) const {
    finish_in(panel, block, sums, result(panel, block), interleaves_ ? kCacheLine : out_stride_);
}

void Product::finish_past_caches(const Tile& tile, int64_t block, const float* sums, int64_t panel_sums) const {
    alignas(kCacheLine) char lines[kBypassRows * kBypassWidth];
    const int64_t panel_bytes = weights_.panel_outputs() * out_item_;
    const int64_t width = (tile.panel_end - tile.panel_begin) * panel_bytes;
    for (int64_t panel = tile.panel_begin; panel < tile.panel_end; ++panel, sums += panel_sums)
        finish_in(panel, block, sums, lines + (panel - tile.panel_begin) * panel_bytes, width);
    char* out = result(tile.panel_begin, block);
    for (int64_t row = 0; row < blocks_.size(block); ++row)
        for (int64_t i = 0; i < width; i += sizeof(__m128i))
            _mm_stream_si128(reinterpret_cast<__m128i*>(out + row * out_stride_ + i),
                             _mm_load_si128(reinterpret_cast<const __m128i*>(lines + row * width + i)));
}

void Product::finish_in(int64_t panel, int64_t block, const float* sums, char* out, int64_t out_stride) const {
    const int64_t outputs = weights_.panel_outputs();
    finish_(sums, blocks_.size(block), weights_.panel_bias(panel), kernel_.panel_width,
            std::min(outputs, weights_.num_outputs() - panel * outputs), gated_, out, out_stride);
}

char* Product::result(int64_t panel, int64_t block) const {
    char* rows = out_ + blocks_.begin(block) * out_stride_;
    const int64_t from = panel * weights_.panel_outputs() * out_item_;
    return interleaves_ ? rows + from / kCacheLine * blocks_.size(block) * kCacheLine + from % kCacheLine : rows + from;
}

}  // namespace swiftkv
