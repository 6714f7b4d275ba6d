#pragma once

// Attention's products on AMX tiles. Include after simd_avx512.h and a definition of Tiles, the eight tile registers;
// all of it has internal linkage.
#include "amx_tile_config.h"
#include "attention_bf16_dot.h"
#include "attention_kernel.h"

namespace swiftkv {
namespace {

// Products of 16 rows with 32 summed elements and 16 columns: tdpbf16ps takes 16 cycles for one, a tile's load 8. Two
// tiles of rows against two of columns load as many tiles as they multiply, so that products set the pace; the sums of
// the four take half of the registers.
struct TileProducts {
    using Element = BFloat16Dot;
    using Elem = uint16_t;
    using Keys = PartitionKeys<Element, kPartitionGroups>;
    static constexpr int kTileRows = 16;
    static constexpr int kTileBytes = 64;
    static constexpr int kStep = 32;  // summed elements
    static constexpr int kTileElements = kTileRows * kStep;
    static constexpr int kKeyAlignment = kStep;
    static constexpr int kPartitionSteps = kPartitionTokens / kStep;
    static constexpr int kStepsPerSlice = 4;  // of 16 products, about as long as weighing a row
    static constexpr int kRowsPerTask = 256;

    static int block_rows(int) { return 2 * kTileRows; }
    static int padded_rows(int rows) { return static_cast<int>(round_up(rows, 2 * kTileRows)); }
    static int padded_dim(const AttentionSpec& spec) { return static_cast<int>(round_up(spec.head_dim, kStep)); }

    // Every tile is whole for as long as a task takes: rows beyond the last hold anything, and nobody reads them.
    struct Registers {
        Registers() {
            TileConfig config;
            for (int tile = 0; tile < 8; ++tile) {
                config.bytes_per_row[tile] = kTileBytes;
                config.rows[tile] = kTileRows;
            }
            Tiles::configure(&config);
        }
        ~Registers() { Tiles::release(); }
    };

    // Fetches the keys and values that follow a partition's into the second-level cache, a few lines before each
    // product of its blocks: many at once would keep the tiles' own loads waiting. One block of rows has too few
    // products to hide it, and then the processor's own prefetching is as good.
    class Fetcher {
      public:
        void begin(const AttentionSpec& spec, const Keys& keys, int num_blocks) {
            next_k_ = keys.k + keys.end_group();
            next_v_ = keys.v + keys.end_group();
            k_stride_ = int64_t{spec.block_size} * 2;
            k_lines_ = spec.head_dim / 2;
            v_lines_ = kGroupTokens * spec.v_head_dim / kStep;
            num_left_ = num_blocks > 1 ? 2 * keys.num_ahead : 0;
            lines_left_ = 0;
            const int num_steps = (keys.end - keys.begin + kStep - 1) / kStep;
            const int num_products = num_blocks * num_steps * (spec.head_dim + spec.v_head_dim) / kStep;
            lines_at_once_ = (keys.num_ahead * (k_lines_ + v_lines_) + num_products - 1) / num_products;
        }
        void operator()() {
            if (lines_left_ == 0 && !next_piece()) return;
            const int count = smaller(lines_at_once_, lines_left_);
            for (int i = 0; i < count; ++i, line_ += stride_) __builtin_prefetch(line_, 0, 2);
            lines_left_ -= count;
        }

      private:
        bool next_piece() {
            if (num_left_ == 0) return false;
            const bool is_k = num_left_-- % 2 == 0;
            line_ = is_k ? *next_k_++ : *next_v_++;
            stride_ = is_k ? k_stride_ : kStep;
            lines_left_ = is_k ? k_lines_ : v_lines_;
            return true;
        }

        const Elem* const* next_k_;
        const Elem* const* next_v_;
        int64_t k_stride_, stride_;
        int k_lines_, v_lines_, lines_left_, lines_at_once_;
        int num_left_;  // pieces: the keys or the values of a group
        const Elem* line_;
    };

    struct Scratch {
        Elem* q;         // [padded_rows, padded_dim]
        Elem* k_tails;   // [kPartitionGroups][kTileElements], if head_dim ends in half a step; zeros fill it
        Elem* v_staged;  // [kPartitionSteps][kStep / 2][v_dim][2]
        const Elem** v;  // [kPartitionSteps], in the pool or in v_staged
        Fetcher fetcher;

        Scratch(Arena& arena, const AttentionSpec& spec, int rows) {
            q = arena.take<Elem>(int64_t{padded_rows(rows)} * padded_dim(spec));
            k_tails = arena.take<Elem>(spec.head_dim % kStep == 0 ? 0 : kPartitionGroups * kTileElements);
            v_staged = arena.take<Elem>(int64_t{kPartitionTokens} * spec.v_head_dim);
            v = arena.take<const Elem*>(kPartitionSteps);
        }
    };

    static void pack_queries(const AttentionSpec& spec, const AttendTask& task, Scratch& scratch) {
        const int rows = task.num_queries * spec.group_size(), dim = padded_dim(spec);
        for (int row = 0; row < rows; ++row) {
            Elem* out = scratch.q + int64_t{row} * dim;
            __builtin_memcpy(out, query_row<Elem>(spec, task, row), spec.head_dim * sizeof(Elem));
            if (dim > spec.head_dim) __builtin_memset(out + spec.head_dim, 0, (dim - spec.head_dim) * sizeof(Elem));
        }
    }

    // Brings what cannot be loaded as whole tiles from where it lies into scratch.
    static void stage(const AttentionSpec& spec, const Keys& keys, int num_blocks, Scratch& scratch) {
        scratch.fetcher.begin(spec, keys, num_blocks);
        for (int step = keys.begin / kStep; step * kStep < keys.end; ++step) {
            const int group = 2 * step;
            const bool whole = keys.has_group(group) && (step + 1) * kStep <= keys.end;
            if (whole && keys.v[group + 1] == keys.v[group] + int64_t{kGroupTokens} * spec.v_head_dim) {
                scratch.v[step] = keys.v[group];
                continue;
            }
            Elem* staged = scratch.v_staged + int64_t{step} * kStep * spec.v_head_dim;
            scratch.v[step] = staged;
            stage_values(spec, keys, group, staged);
            stage_values(spec, keys, group + 1, staged + int64_t{kGroupTokens} * spec.v_head_dim);
        }
        if (spec.head_dim % kStep == 0) return;
        for (int group = keys.begin / kGroupTokens; group * kGroupTokens < keys.end; ++group)
            stage_tail(spec, keys.k[group], scratch.k_tails + group * kTileElements);
    }

    // scores[r, t] = q[r] . k[t] for a block of rows and the keys of a partition that it sees.
    template <typename Meanwhile>
    static void score(const AttentionSpec& spec, Scratch& scratch, const Keys& keys, const RowBlock& block,
                      float* scores, Meanwhile&& meanwhile) {
        const Elem* q = scratch.q + int64_t{block.begin} * padded_dim(spec);
        for (int key = block.key_begin; key < block.key_end; key += kStep) {
            // Where one of a step's two groups is not in the table, the other's scores fill its place, to be masked.
            const int first = keys.nearest_group(key / kGroupTokens);
            const int second = keys.nearest_group(key / kGroupTokens + 1);
            if (block.end - block.begin > kTileRows)
                score_step<true>(spec, scratch, q, keys, first, second, scores + key);
            else
                score_step<false>(spec, scratch, q, keys, first, second, scores + key);
            meanwhile();
        }
    }

    // out[r] = sum(weights[r, t] v[t]) for a block of rows, over the keys of a partition that it sees.
    template <typename Meanwhile>
    static void accumulate(const AttentionSpec& spec, Scratch& scratch, const Keys&, const RowBlock& block,
                           const Elem* weights, float* out, Meanwhile&& meanwhile) {
        if (block.key_begin == block.key_end) return;
        const bool two_rows = block.end - block.begin > kTileRows;
        for (int d = 0; d < spec.v_head_dim; d += 2 * kTileRows) {
            float* sums = out + int64_t{block.begin} * spec.v_head_dim + d;
            const bool two_columns = spec.v_head_dim - d > kTileRows;
            if (two_rows && two_columns)
                accumulate_columns<true, true>(spec, scratch, block, weights, d, sums, meanwhile);
            else if (two_rows)
                accumulate_columns<true, false>(spec, scratch, block, weights, d, sums, meanwhile);
            else if (two_columns)
                accumulate_columns<false, true>(spec, scratch, block, weights, d, sums, meanwhile);
            else
                accumulate_columns<false, false>(spec, scratch, block, weights, d, sums, meanwhile);
        }
    }

  private:
    // Copies a group of values; those that nobody sees may be anything in the pool, and are zero here.
    static void stage_values(const AttentionSpec& spec, const Keys& keys, int group, Elem* to) {
        const int64_t pair = 2 * int64_t{spec.v_head_dim};
        const int written = keys.has_group(group) ? smaller(keys.end - group * kGroupTokens, kGroupTokens) : 0;
        const int whole_pairs = written / 2;
        if (whole_pairs > 0) __builtin_memcpy(to, keys.v[group], whole_pairs * pair * sizeof(Elem));
        if (whole_pairs == kGroupTokens / 2) return;
        __builtin_memset(to + whole_pairs * pair, 0, (kGroupTokens / 2 - whole_pairs) * pair * sizeof(Elem));
        if (written % 2 == 1)
            for (int64_t i = whole_pairs * pair; i < (whole_pairs + 1) * pair; i += 2) to[i] = keys.v[group][i];
    }

    // Copies the last 16 dimensions of a group of keys; the other half of the tile is zero.
    static void stage_tail(const AttentionSpec& spec, const Elem* k, Elem* to) {
        const int pairs = kStep / 4;
        const Elem* from = k + int64_t{spec.head_dim / kStep * kStep} * spec.block_size;
        for (int i = 0; i < pairs; ++i)
            __builtin_memcpy(to + i * kStep, from + int64_t{i} * spec.block_size * 2, kTileBytes);
        __builtin_memset(to + pairs * kStep, 0, pairs * kTileBytes);
    }

    // Sums are in tiles 0 to 3 (rows, then columns), rows in 4 and 5, columns in 6 and 7.
    template <bool kTwoRows, bool kTwoColumns>
    static void zero_sums() {
        Tiles::zero<0>();
        if constexpr (kTwoColumns) Tiles::zero<1>();
        if constexpr (kTwoRows) Tiles::zero<2>();
        if constexpr (kTwoRows && kTwoColumns) Tiles::zero<3>();
    }

    template <bool kTwoRows, bool kTwoColumns>
    static void multiply(Fetcher& fetcher, const Elem* rows, int64_t row_bytes, const Elem* columns,
                         const Elem* more_columns, int64_t column_bytes) {
        fetcher();
        Tiles::load<4>(rows, row_bytes);
        Tiles::load<6>(columns, column_bytes);
        Tiles::dot<0, 4, 6>();
        if constexpr (kTwoColumns) {
            Tiles::load<7>(more_columns, column_bytes);
            Tiles::dot<1, 4, 7>();
        }
        if constexpr (kTwoRows) {
            Tiles::load<5>(rows + kTileRows * row_bytes / static_cast<int64_t>(sizeof(Elem)), row_bytes);
            Tiles::dot<2, 5, 6>();
            if constexpr (kTwoColumns) Tiles::dot<3, 5, 7>();
        }
    }

    template <bool kTwoRows, bool kTwoColumns>
    static void store_sums(float* to, int64_t row_elements) {
        const int64_t row_bytes = row_elements * static_cast<int64_t>(sizeof(float));
        Tiles::store<0>(to, row_bytes);
        if constexpr (kTwoColumns) Tiles::store<1>(to + kTileRows, row_bytes);
        if constexpr (kTwoRows) Tiles::store<2>(to + kTileRows * row_elements, row_bytes);
        if constexpr (kTwoRows && kTwoColumns) Tiles::store<3>(to + kTileRows * row_elements + kTileRows, row_bytes);
    }

    template <bool kTwoRows>
    static void score_step(const AttentionSpec& spec, Scratch& scratch, const Elem* q, const Keys& keys, int first,
                           int second, float* scores) {
        const int64_t q_bytes = padded_dim(spec) * static_cast<int64_t>(sizeof(Elem));
        zero_sums<kTwoRows, true>();
        int d = 0;
        for (; d + kStep <= spec.head_dim; d += kStep) {
            const int64_t offset = int64_t{d} * spec.block_size;
            multiply<kTwoRows, true>(scratch.fetcher, q + d, q_bytes, keys.k[first] + offset, keys.k[second] + offset,
                                     int64_t{spec.block_size} * 2 * sizeof(Elem));
        }
        if (d < spec.head_dim)
            multiply<kTwoRows, true>(scratch.fetcher, q + d, q_bytes, scratch.k_tails + first * kTileElements,
                                     scratch.k_tails + second * kTileElements, kTileBytes);
        store_sums<kTwoRows, true>(scores, kRowStride);
    }

    template <bool kTwoRows, bool kTwoColumns, typename Meanwhile>
    static void accumulate_columns(const AttentionSpec& spec, Scratch& scratch, const RowBlock& block,
                                   const Elem* weights, int d, float* sums, Meanwhile&& meanwhile) {
        zero_sums<kTwoRows, kTwoColumns>();
        for (int step = block.key_begin / kStep; step < block.key_end / kStep; ++step) {
            const Elem* columns = scratch.v[step] + d * 2;
            multiply<kTwoRows, kTwoColumns>(scratch.fetcher, weights + step * kStep, kRowStride * sizeof(Elem), columns,
                                            columns + kTileRows * 2, spec.v_head_dim * 2 * sizeof(Elem));
            if (step % kStepsPerSlice == kStepsPerSlice - 1) meanwhile();
        }
        store_sums<kTwoRows, kTwoColumns>(sums, spec.v_head_dim);
    }
};

}  // namespace
}  // namespace swiftkv
