#pragma once

// Attention's products on AMX tiles. Include after simd_avx512.h and a definition of Tiles, the eight tile registers;
// all of it has internal linkage.
#include "amx_tile_config.h"
#include "attention_amx_weights.h"
#include "attention_fetch.h"
#include "attention_kernel.h"
#include "attention_tile_order.h"

namespace swiftkv {
namespace {

// Products of 16 rows with 32 summed elements and 16 columns. tdpbf16ps takes 16 cycles for one, the load of a tile 8.
// Two tiles of rows times two of columns take four loads and four products, so that products set the pace; the four
// tiles of sums take half of the registers.
struct TileProducts {
    using Element = BFloat16Dot;
    using Rows = Softmax<Element>;
    using Elem = uint16_t;
    using Keys = PartitionKeys<Element, kPartitionGroups>;
    static constexpr int kTileRows = 16;
    static constexpr int kTileBytes = 64;
    static constexpr int kStep = 32;  // summed elements
    static constexpr int kTileElements = kTileRows * kStep;
    static constexpr int kPartitionSteps = kPartitionTokens / kStep;
    static constexpr int kStepsStagedAtOnce = 2;
    static constexpr int kRowsPerTask = 256;
    static constexpr int kFewRows = 8;  // a task with no more rows is faster with vectors
    static_assert(kStep == kStepKeys && 2 * kTileRows == kMaxBlockRows);

    static int block_rows(int) { return 2 * kTileRows; }
    static int padded_rows(int rows) { return static_cast<int>(round_up(rows, 2 * kTileRows)); }
    static int padded_dim(const AttentionSpec& spec) { return static_cast<int>(round_up(spec.head_dim, kStep)); }

    // Makes vector instructions take denormal numbers as zero, as tiles do.
    class Rounding {
      public:
        Rounding() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
        ~Rounding() { _mm_setcsr(before_); }

      private:
        unsigned before_;
    };

    // Configures the tiles for a task. If it has fewer than 16 rows, tiles of rows and of sums have only these, because
    // each row costs time. Else all tiles are whole: rows after the last hold anything, and are not read.
    struct Registers {
        explicit Registers(int rows) : has_tiles_(rows > kFewRows) {
            if (!has_tiles_) return;
            TileConfig config;
            for (int tile = 0; tile < 8; ++tile) {
                config.bytes_per_row[tile] = kTileBytes;
                config.rows[tile] = static_cast<uint8_t>(tile < 6 ? smaller(rows, kTileRows) : kTileRows);
            }
            Tiles::configure(&config);
        }
        ~Registers() {
            if (has_tiles_) Tiles::release();
        }

      private:
        bool has_tiles_;
    };

    struct Scratch {
        Elem* q;            // [padded_rows, padded_dim], unless there are few rows
        float* few_q;       // [kFewRows, head_dim], as TileOrder takes them
        Elem* k_tails;      // [kPartitionGroups][kTileElements], if head_dim ends in half a step; padded with zeros
        Elem* v_staged;     // [kPartitionSteps][kStep / 2][v_dim][2]
        const Elem** v;     // [kPartitionSteps], in the pool or in v_staged
        int steps_at_once;  // steps whose values are in v_staged, step s at index s % steps_at_once
        Elem* weights[2];   // [block rows, kRowStride], of the block that is scored and the previous one
        StepWeights::Scratch step_weights;
        SoftmaxState part;       // of a block, in a partition that is not the first
        Rows::Factors* factors;  // [kMaxBlockRows], of such a block
        Fetcher<Element, 2> fetcher;
        int lines_per_product;  // fetched with each product of tiles

        Scratch(Arena& arena, const AttentionSpec& spec, int rows)
            : step_weights(arena), part(arena, kMaxBlockRows, spec.v_head_dim) {
            factors = arena.take<Rows::Factors>(kMaxBlockRows);
            for (Elem*& of_block : weights) of_block = arena.take<Elem>(kMaxBlockRows * kRowStride);
            q = arena.take<Elem>(int64_t{padded_rows(rows)} * padded_dim(spec));
            few_q = arena.take<float>(int64_t{kFewRows} * spec.head_dim);
            k_tails = arena.take<Elem>(spec.head_dim % kStep == 0 ? 0 : kPartitionGroups * kTileElements);
            v_staged = arena.take<Elem>(int64_t{kPartitionTokens} * spec.v_head_dim);
            v = arena.take<const Elem*>(kPartitionSteps);
        }
    };

    static void pack_queries(const AttentionSpec& spec, const AttendTask& task, Scratch& scratch) {
        const int rows = task.num_queries * spec.group_size(), dim = padded_dim(spec);
        if (rows <= kFewRows) return pack_few_queries(spec, task, rows, scratch.few_q);
        for (int row = 0; row < rows; ++row) {
            Elem* out = scratch.q + int64_t{row} * dim;
            __builtin_memcpy(out, query_row<Elem>(spec, task, row), spec.head_dim * sizeof(Elem));
            if (dim > spec.head_dim) __builtin_memset(out + spec.head_dim, 0, (dim - spec.head_dim) * sizeof(Elem));
        }
    }

    // Copies data that cannot be loaded as whole tiles in place to scratch: all values at once if several blocks of
    // rows need them, else a few steps at a time, which are then in the first-level cache when they are multiplied.
    static void stage(const AttentionSpec& spec, const Keys& keys, int num_blocks, Scratch& scratch) {
        if (num_blocks == 1)
            scratch.fetcher.begin_within(spec, keys);
        else
            scratch.fetcher.begin_behind(spec, keys);
        const int num_steps = (keys.end - keys.begin + kStep - 1) / kStep;
        const int num_products = num_blocks * num_steps * (spec.head_dim + spec.v_head_dim) / kStep;
        scratch.lines_per_product = (scratch.fetcher.num_lines() + num_products - 1) / num_products;
        scratch.steps_at_once = num_blocks == 1 ? kStepsStagedAtOnce : kPartitionSteps;
        if (num_blocks > 1) stage_steps(spec, keys, keys.begin / kStep, (keys.end + kStep - 1) / kStep, scratch);
        if (spec.head_dim % kStep == 0) return;
        for (int group = keys.begin / kGroupTokens; group * kGroupTokens < keys.end; ++group)
            stage_tail(spec, keys.k[group], scratch.k_tails + group * kTileElements);
    }

    // Adds the keys of one partition to `total`, or begins `total` with the task's first partition. The scores of a
    // block of rows are found and weighed while values are multiplied by the weights of the previous block.
    static void add_partition(const AttentionSpec& spec, const AttendTask& task, int partition,
                              const AttendTask* next_task, Scratch& scratch, const SoftmaxState& total) {
        const int rows = task.num_queries * spec.group_size(), per_block = block_rows(rows);
        const int num_blocks = (rows + per_block - 1) / per_block, start = partition * kPartitionTokens;
        const bool is_first = partition == task.partition_begin;
        const Keys keys(spec, task, partition, next_task);
        if (rows <= kFewRows) {
            scratch.fetcher.begin_within(spec, keys);
            const auto add = rows == 1   ? add_few<1>
                             : rows == 2 ? add_few<2>
                             : rows <= 4 ? add_few<4>
                                         : add_few<kFewRows>;
            return add(spec, task, start, keys, is_first, scratch, total);
        }
        stage(spec, keys, num_blocks, scratch);
        Sums before{};
        for (int i = 0; i <= num_blocks; ++i) {
            RowBlock block{};
            if (i < num_blocks)
                block = row_block(spec, task, start, i * per_block, smaller((i + 1) * per_block, rows), kStep);
            const SoftmaxState part = is_first ? total.from(block.begin, spec.v_head_dim) : scratch.part;
            StepWeights weights(spec, task, start, block, scratch.step_weights, scratch.weights[i % 2], part);
            if (i == 0)
                score(spec, scratch, keys, block, 0, 1, weights);
            else
                accumulate(spec, scratch, keys, before, block, weights);
            while (weights.end_pass()) score(spec, scratch, keys, block, 0, 1, weights);
            before = {block, scratch.weights[i % 2], part.out, is_first ? nullptr : total.out};
            if (!is_first) add_rows(spec, block, total, scratch);
        }
    }

  private:
    static void pack_few_queries(const AttentionSpec& spec, const AttendTask& task, int rows, float* to) {
        __builtin_memset(to, 0, int64_t{kFewRows} * spec.head_dim * sizeof(float));
        for (int row = 0; row < rows; ++row, to += spec.head_dim) {
            const Elem* q = query_row<Elem>(spec, task, row);
            for (int d = 0; d < spec.head_dim; d += kTileRows) Simd::store(to + d, Simd::load_bf16(q + d));
        }
    }

    // Adds the keys of one partition to the sums of a few rows.
    template <int kRows>
    static void add_few(const AttentionSpec& spec, const AttendTask& task, int start, const Keys& keys, bool is_first,
                        Scratch& scratch, const SoftmaxState& total) {
        using Order = TileOrder<kRows, Element>;
        const int rows = task.num_queries * spec.group_size();
        const RowBlock block = row_block(spec, task, start, 0, rows, kStep);
        const int first_step = block.key_begin / kStep, last_step = block.key_end / kStep;
        const SoftmaxState part = is_first ? total : scratch.part;
        StepWeights weights(spec, task, start, block, scratch.step_weights, scratch.weights[0], part);
        do {
            for (int step = first_step; step < last_step; ++step) {
                const Elem* const pair[] = {keys.k[keys.nearest_group(2 * step)],
                                            keys.k[keys.nearest_group(2 * step + 1)]};
                Order::score(spec, scratch.fetcher, scratch.few_q, pair, weights.next_scores(), kStep);
                weights.scored();
                weights();
            }
        } while (weights.end_pass());
        __builtin_memset(part.out, 0, int64_t{kRows} * spec.v_head_dim * sizeof(float));
        for (int step = first_step; step < last_step; ++step) {
            const int key = step * kStep;
            Order::accumulate(spec, scratch.fetcher, scratch.weights[0] + key, rows, kRowStride, keys.v + 2 * step,
                              larger(keys.first_group() * kGroupTokens - key, 0), smaller(keys.end - key, kStep),
                              part.out);
        }
        if (is_first) return;
        add_rows(spec, block, total, scratch);
        add_columns(spec, scratch, {block, nullptr, part.out, total.out}, 0, spec.v_head_dim);
    }

    // A block of rows whose weighted values must be summed.
    struct Sums {
        RowBlock block;
        const Elem* weights;
        float* out;
        float* total;  // what the sums are added to, from the task's first row on; or nullptr
    };
    struct Steps {
        int begin, end;
        bool is_first;  // the sums begin with these steps
    };

    // Finds the scores of a block of rows for the keys that it sees: part `share` of `num_shares` parts of them.
    static void score(const AttentionSpec& spec, Scratch& scratch, const Keys& keys, const RowBlock& block, int share,
                      int num_shares, StepWeights& weights) {
        const Elem* q = scratch.q + int64_t{block.begin} * padded_dim(spec);
        const int first_step = block.key_begin / kStep, num_steps = block.key_end / kStep - first_step;
        const int end = first_step + num_steps * (share + 1) / num_shares;
        for (int step = first_step + num_steps * share / num_shares; step < end; ++step) {
            // If one of a step's two groups is not in the table, the other's scores fill its place, and are masked.
            const int first = keys.nearest_group(2 * step), second = keys.nearest_group(2 * step + 1);
            float* scores = weights.next_scores();
            if (block.end - block.begin > kTileRows)
                score_step<true>(spec, scratch, q, keys, first, second, scores, weights);
            else
                score_step<false>(spec, scratch, q, keys, first, second, scores, weights);
            weights.scored();
        }
    }

    // Sums the values of the previous block while the next one is scored and weighed.
    static void accumulate(const AttentionSpec& spec, Scratch& scratch, const Keys& keys, const Sums& sums,
                           const RowBlock& next, StepWeights& next_weights) {
        const int first = sums.block.key_begin / kStep, last = sums.block.key_end / kStep;
        const int num_columns = (spec.v_head_dim + kStep - 1) / kStep;
        int begin = first;
        do {
            const Steps steps{begin, smaller(begin + scratch.steps_at_once, last), begin == first};
            if (scratch.steps_at_once < kPartitionSteps) stage_steps(spec, keys, steps.begin, steps.end, scratch);
            for (int column = 0; column < num_columns; ++column) {
                score(spec, scratch, keys, next, column, num_columns, next_weights);
                accumulate_columns(spec, scratch, steps, sums, column * kStep, next_weights);
                if (steps.end < last || sums.total == nullptr) continue;
                add_columns(spec, scratch, sums, column * kStep, smaller((column + 1) * kStep, spec.v_head_dim));
            }
            begin += scratch.steps_at_once;
        } while (begin < last);
    }

    static void accumulate_columns(const AttentionSpec& spec, Scratch& scratch, const Steps& steps, const Sums& sums,
                                   int d, StepWeights& next_weights) {
        const bool two_rows = sums.block.end - sums.block.begin > kTileRows;
        const bool two_columns = spec.v_head_dim - d > kTileRows;
        if (two_rows && two_columns)
            accumulate_steps<true, true>(spec, scratch, steps, sums, d, next_weights);
        else if (two_rows)
            accumulate_steps<true, false>(spec, scratch, steps, sums, d, next_weights);
        else if (two_columns)
            accumulate_steps<false, true>(spec, scratch, steps, sums, d, next_weights);
        else
            accumulate_steps<false, false>(spec, scratch, steps, sums, d, next_weights);
    }

    // Adds a block's maxima and sums of weights to `total`, and keeps the factors for its values.
    static void add_rows(const AttentionSpec& spec, const RowBlock& block, const SoftmaxState& total,
                         Scratch& scratch) {
        const float c = Rows::exponent_scale(spec);
        for (int row = block.begin; row < block.end; ++row) {
            const int i = row - block.begin;
            scratch.factors[i] =
                Rows::add_row(c, total.max[row], total.sum[row], scratch.part.max[i], scratch.part.sum[i]);
        }
    }
    static void add_columns(const AttentionSpec& spec, const Scratch& scratch, const Sums& sums, int begin, int end) {
        const int64_t v_dim = spec.v_head_dim;
        for (int row = sums.block.begin; row < sums.block.end; ++row) {
            const int i = row - sums.block.begin;
            Rows::add_values(scratch.factors[i], begin, end, sums.total + row * v_dim, sums.out + i * v_dim);
        }
    }

    static void stage_steps(const AttentionSpec& spec, const Keys& keys, int begin, int end, Scratch& scratch) {
        for (int step = begin; step < end; ++step) {
            const int group = 2 * step;
            const bool whole = keys.has_group(group) && (step + 1) * kStep <= keys.end;
            if (whole && keys.v[group + 1] == keys.v[group] + int64_t{kGroupTokens} * spec.v_head_dim) {
                scratch.v[step] = keys.v[group];
                continue;
            }
            const int place = step % scratch.steps_at_once;
            Elem* staged = scratch.v_staged + int64_t{place} * kStep * spec.v_head_dim;
            scratch.v[step] = staged;
            stage_values(spec, keys, group, staged);
            stage_values(spec, keys, group + 1, staged + int64_t{kGroupTokens} * spec.v_head_dim);
        }
    }

    // Copies a group of values. Values that no query sees may be anything in the pool, and are zero in the copy.
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

    // Copies the last 16 dimensions of a group of keys, and fills the other half of the tile with zeros.
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
    static void load_sums(const float* from, int64_t row_elements) {
        const int64_t row_bytes = row_elements * static_cast<int64_t>(sizeof(float));
        Tiles::load<0>(from, row_bytes);
        if constexpr (kTwoColumns) Tiles::load<1>(from + kTileRows, row_bytes);
        if constexpr (kTwoRows) Tiles::load<2>(from + kTileRows * row_elements, row_bytes);
        if constexpr (kTwoRows && kTwoColumns) Tiles::load<3>(from + kTileRows * row_elements + kTileRows, row_bytes);
    }

    template <bool kTwoRows, bool kTwoColumns>
    static void multiply(Scratch& scratch, StepWeights& weights, const Elem* rows, int64_t row_bytes,
                         const Elem* columns, const Elem* more_columns, int64_t column_bytes) {
        scratch.fetcher(scratch.lines_per_product);
        weights();
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
                           int second, float* scores, StepWeights& weights) {
        const int64_t q_bytes = padded_dim(spec) * static_cast<int64_t>(sizeof(Elem));
        zero_sums<kTwoRows, true>();
        int d = 0;
        for (; d + kStep <= spec.head_dim; d += kStep) {
            const int64_t offset = int64_t{d} * spec.block_size;
            multiply<kTwoRows, true>(scratch, weights, q + d, q_bytes, keys.k[first] + offset, keys.k[second] + offset,
                                     int64_t{spec.block_size} * 2 * sizeof(Elem));
        }
        if (d < spec.head_dim)
            multiply<kTwoRows, true>(scratch, weights, q + d, q_bytes, scratch.k_tails + first * kTileElements,
                                     scratch.k_tails + second * kTileElements, kTileBytes);
        store_sums<kTwoRows, true>(scores, kStep);
    }

    template <bool kTwoRows, bool kTwoColumns>
    static void accumulate_steps(const AttentionSpec& spec, Scratch& scratch, const Steps& steps, const Sums& sums,
                                 int d, StepWeights& next_weights) {
        if (steps.is_first)
            zero_sums<kTwoRows, kTwoColumns>();
        else
            load_sums<kTwoRows, kTwoColumns>(sums.out + d, spec.v_head_dim);
        for (int step = steps.begin; step < steps.end; ++step) {
            const Elem* columns = scratch.v[step] + d * 2;
            multiply<kTwoRows, kTwoColumns>(scratch, next_weights, sums.weights + step * kStep,
                                            kRowStride * sizeof(Elem), columns, columns + kTileRows * 2,
                                            spec.v_head_dim * 2 * sizeof(Elem));
        }
        store_sums<kTwoRows, kTwoColumns>(sums.out + d, spec.v_head_dim);
    }
};

}  // namespace
}  // namespace swiftkv
