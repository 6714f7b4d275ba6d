#pragma once

// Products of a few rows on the vector unit, summed in the order of tiles. Include after simd_avx512.h; all of it has
// internal linkage.
#include "attention_fetch.h"

namespace swiftkv {
namespace {

// A tile sums the products of the first elements of its 16 pairs, and separately those of the second elements, each in
// order, and adds both to what was there. These vectors do the same, because a row's bits must not depend on the number
// of rows computed with it. For a few rows they are faster. They read pairs in place, where a tile of values must first
// be put together from two groups of 16 tokens. And while a tile waits for memory, nothing else begins.
template <int kRows, typename E>
struct TileOrder {
    using V = Simd::V;
    using Elem = typename E::Elem;
    using Fetch = Fetcher<E, 2>;
    static constexpr int kPairs = 16;  // of a tile
    static constexpr int kLanes = Simd::kLanes;
    // The groups of keys, and vectors of values, that are multiplied at once: their sums take half of the registers.
    static constexpr int kGroups = kRows <= 4 ? 2 : 1;
    static constexpr int kVectors = 8 / kRows;

    // Finds the scores of two groups of keys: [kRows, 2 * kLanes], rows `row_stride` apart. q: [kRows, head_dim].
    static void score(const AttentionSpec& spec, Fetch& fetcher, const float* q, const Elem* const (&keys)[2],
                      float* scores, int64_t row_stride) {
        for (int group = 0; group < 2; group += kGroups)
            score_groups(spec, fetcher, q, keys + group, scores + group * kLanes, row_stride);
    }

    // Adds the weighted values of two groups of keys to out: [kRows, v_head_dim]. weights: [num_rows, 2 * kLanes], rows
    // `row_stride` apart. Keys outside of [begin, end) may be anything; `begin` is the first of a group.
    static void accumulate(const AttentionSpec& spec, Fetch& fetcher, const Elem* weights, int num_rows,
                           int64_t row_stride, const Elem* const* values, int begin, int end, float* out) {
        Weights of_rows{};
        for (int row = 0; row < num_rows; ++row) {
            Simd::store(of_rows.first[row], Simd::load_bf16_pair_first(weights + row * row_stride));
            Simd::store(of_rows.second[row], Simd::load_bf16_pair_second(weights + row * row_stride));
        }
        int d = 0;
        for (; d + kVectors * kLanes <= spec.v_head_dim; d += kVectors * kLanes)
            accumulate_vectors<kVectors>(spec, fetcher, of_rows, values, begin, end, d, out);
        for (; d < spec.v_head_dim; d += kLanes)
            accumulate_vectors<1>(spec, fetcher, of_rows, values, begin, end, d, out);
    }

  private:
    struct Weights {
        alignas(64) float first[kRows][kPairs];
        alignas(64) float second[kRows][kPairs];
    };

    template <int kCount>
    struct Sums {
        V first[kRows][kCount], second[kRows][kCount];

        Sums() {
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
                for (int i = 0; i < kCount; ++i) first[row][i] = second[row][i] = Simd::zero();
        }
        void add_first(int i, V x, const float* factors, int64_t stride) {
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row)
                first[row][i] = Simd::fma(x, Simd::set1(factors[row * stride]), first[row][i]);
        }
        void add_second(int i, V x, const float* factors, int64_t stride) {
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row)
                second[row][i] = Simd::fma(x, Simd::set1(factors[row * stride]), second[row][i]);
        }
        V of(int row, int i) const { return Simd::add(first[row][i], second[row][i]); }
    };

    static void score_groups(const AttentionSpec& spec, Fetch& fetcher, const float* q, const Elem* const* keys,
                             float* scores, int64_t row_stride) {
        const int64_t pair_stride = int64_t{spec.block_size} * 2;
        V total[kRows][kGroups];
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
            for (int i = 0; i < kGroups; ++i) total[row][i] = Simd::zero();
        for (int begin = 0; begin < spec.head_dim; begin += 2 * kPairs) {
            Sums<kGroups> sums;
            for (int d = begin; d < smaller(begin + 2 * kPairs, spec.head_dim); d += 2) {
                fetcher(kGroups);
#pragma GCC unroll 2
                for (int i = 0; i < kGroups; ++i) {
                    const Elem* pairs = keys[i] + d / 2 * pair_stride;
                    sums.add_first(i, Simd::load_bf16_pair_first(pairs), q + d, spec.head_dim);
                    sums.add_second(i, Simd::load_bf16_pair_second(pairs), q + d + 1, spec.head_dim);
                }
            }
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
                for (int i = 0; i < kGroups; ++i) total[row][i] = Simd::add(total[row][i], sums.of(row, i));
        }
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
            for (int i = 0; i < kGroups; ++i) Simd::store(scores + row * row_stride + i * kLanes, total[row][i]);
    }

    template <int kCount>
    static void accumulate_vectors(const AttentionSpec& spec, Fetch& fetcher, const Weights& weights,
                                   const Elem* const* values, int begin, int end, int d, float* out) {
        const int64_t v_dim = spec.v_head_dim;
        Sums<kCount> sums;
        for (int token = begin; token < end; token += 2) {
            fetcher(kCount);
            const int pair = token / 2;
            const Elem* pairs = values[token / kGroupTokens] + token % kGroupTokens * v_dim + 2 * d;
#pragma GCC unroll 8
            for (int i = 0; i < kCount; ++i)
                sums.add_first(i, Simd::load_bf16_pair_first(pairs + 2 * i * kLanes), weights.first[0] + pair, kPairs);
            if (token + 1 == end) break;  // the partner of the last token may not be written yet
#pragma GCC unroll 8
            for (int i = 0; i < kCount; ++i)
                sums.add_second(i, Simd::load_bf16_pair_second(pairs + 2 * i * kLanes), weights.second[0] + pair,
                                kPairs);
        }
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
            for (int i = 0; i < kCount; ++i) {
                float* to = out + row * v_dim + d + i * kLanes;
                Simd::store(to, Simd::add(Simd::load(to), sums.of(row, i)));
            }
    }
};

}  // namespace
}  // namespace swiftkv
