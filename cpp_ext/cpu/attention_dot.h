#pragma once

// Attention's products on the vector unit. Include after a simd_*.h; all of it has internal linkage.
#include "attention_fetch.h"
#include "attention_softmax.h"

namespace swiftkv {
namespace {

template <typename E>
struct DotProducts {
    using Element = E;
    using V = Simd::V;
    using Elem = typename E::Elem;
    using Packed = typename E::Packed;
    static constexpr int kWidth = Simd::kLanes;
    static constexpr int kPack = E::kPack;
    static constexpr int kVectorsPerGroup = kGroupTokens / kWidth;
    static constexpr int kAccumulators = kWidth == 16 ? 24 : 12;  // registers, of 32 or 16
    // The rows and vectors of keys whose accumulators fill them. Widening takes the same units as multiplying, so many
    // rows share it.
    static constexpr int kMaxRows = kWidth == 16 && E::kIsWidened ? 12 : 6;
    static constexpr int kMaxVectors = kWidth == 16 && !E::kIsWidened ? 4 : 2;
    static constexpr int kMaxGroups = kMaxVectors / kVectorsPerGroup;
    using Fetch = Fetcher<E, 1>;
    using Keys = PartitionKeys<E, Fetch::kGroupsInTurn>;
    // A constant, so that one register addresses the queries of all rows; not a power of two, for the reason given at
    // kRowStride.
    static constexpr int kQueryStride = kMaxHeadDim + 32;
    static constexpr int kRowsPerTask = kWidth == 16 ? 192 : 48;
    static constexpr int kLinesWhileWeighing = 32;
    static constexpr int kTokensAtOnce = 4 * kGroupTokens;  // tokens whose values a single block of rows sums at once

    // The rows of a block: blocks have equal sizes, except the last.
    static int block_rows(int rows) {
        const int num_blocks = (rows + kMaxRows - 1) / kMaxRows;
        return (rows + num_blocks - 1) / num_blocks;
    }
    // The vectors of each value that are summed at once: few rows leave registers for many, and values are read best in
    // the order in which they lie.
    static constexpr int value_vectors(int rows) {
        int vectors = 8;
        while (rows * vectors > kAccumulators) vectors /= 2;
        return vectors;
    }
    static int padded_rows(int rows) { return rows; }

    struct Rounding {};
    struct Registers {
        explicit Registers(int) {}
    };

    struct Scratch {
        Packed* q;           // [rows, kQueryStride]
        float* scores[2];    // [rows of a block, kRowStride]
        Packed* weights[2];  // [rows of a block, kRowStride]
        SoftmaxState part;   // of a partition that is not the first
        Fetch fetcher;

        Scratch(Arena& arena, const AttentionSpec& spec, int rows)
            : q(arena.take<Packed>(int64_t{rows} * kQueryStride)), part(arena, rows, spec.v_head_dim) {
            const int64_t in_block = block_rows(rows);
            for (int i = 0; i < 2; ++i) {
                scores[i] = arena.take<float>(in_block * kRowStride);
                weights[i] = arena.take<Packed>(in_block * kRowStride);
            }
        }
    };

    static void pack_queries(const AttentionSpec& spec, const AttendTask& task, Scratch& scratch) {
        const int head_dim = spec.head_dim, rows = task.num_queries * spec.group_size();
        for (int row = 0; row < rows; ++row) {
            const Elem* q = query_row<Elem>(spec, task, row);
            Packed* packed = scratch.q + int64_t{row} * kQueryStride;
            for (int d = 0; d < head_dim; d += kWidth) E::pack(packed + d, E::load(q + d));
        }
    }

    // Adds the keys of one partition to `total`, or begins `total` with the task's first partition.
    static void add_partition(const AttentionSpec& spec, const AttendTask& task, int partition,
                              const AttendTask* next_task, Scratch& scratch, const SoftmaxState& total) {
        if (partition == task.partition_begin)
            return attend_partition(spec, task, partition, next_task, scratch, total);
        attend_partition(spec, task, partition, next_task, scratch, scratch.part);
        Softmax<E>::merge(spec, total, scratch.part, task.num_queries * spec.group_size());
    }

    // scores[r, t] = q[r] . k[t] for a block of rows and the keys of a partition that it sees.
    template <typename Meanwhile>
    static void score(const AttentionSpec& spec, Scratch& scratch, const Keys& keys, const RowBlock& block,
                      float* scores, Meanwhile&& meanwhile) {
        const Packed* q = scratch.q + int64_t{block.begin} * kQueryStride;
        const int end = block.key_end / kGroupTokens;
        for (int group = block.key_begin / kGroupTokens; group < end; group += kMaxGroups) {
            with_constant<kMaxRows>(block.end - block.begin, [&](auto rows) {
                with_constant<kMaxVectors>(smaller(kMaxGroups, end - group) * kVectorsPerGroup, [&](auto vectors) {
                    score_groups<rows(), vectors()>(spec, scratch.fetcher, q, keys.k + group,
                                                    scores + group * kGroupTokens);
                });
            });
            meanwhile();
        }
    }

    // out[r] += sum(weights[r, t] v[t]) for a block of rows, over the given keys of a partition.
    template <typename Meanwhile>
    static void accumulate(const AttentionSpec& spec, Scratch& scratch, const Keys& keys, const RowBlock& block,
                           int key_begin, int key_end, const Packed* weights, float* out, Meanwhile&& meanwhile) {
        with_constant<kMaxRows>(block.end - block.begin, [&](auto rows) {
            constexpr int kVectors = value_vectors(rows());
            for (int d = 0; d < spec.v_head_dim; d += kVectors * kWidth) {
                float* sums = out + int64_t{block.begin} * spec.v_head_dim + d;
                with_constant<kVectors>(smaller(kVectors, (spec.v_head_dim - d) / kWidth), [&](auto vectors) {
                    accumulate_dims<rows(), vectors()>(spec, scratch.fetcher, weights, keys, key_begin, key_end, d,
                                                       sums);
                });
                meanwhile();
            }
        });
    }

  private:
    // Turns a block's scores into weights, one row per call.
    struct Weighing {
        Fetch& fetcher;
        const AttentionSpec& spec;
        const AttendTask& task;
        const RowBlock& block;
        int start;  // position of the partition's first key
        float* scores;
        Packed* weights;
        const SoftmaxState& part;
        int row;

        void operator()() {
            if (row >= block.end) return;
            fetcher(kLinesWhileWeighing);
            const int64_t offset = int64_t{row - block.begin} * kRowStride;
            const int query = task.first_position + row / spec.group_size();
            const int lo = larger(spec.first_visible(query) - start, block.key_begin);
            const int hi = smaller(query + 1 - start, block.key_end);
            Softmax<E>::weigh(spec, block.key_begin, block.key_end, lo, hi, scores + offset, weights + offset,
                              part.max[row], part.sum[row]);
            ++row;
        }
        void finish() {
            while (row < block.end) (*this)();
        }
    };

    // Attends to the keys of one partition; the result goes to `part`. Each block of rows is scored, weighed and
    // summed. While one block's scores are weighed, products of the blocks before and after it are under way.
    static void attend_partition(const AttentionSpec& spec, const AttendTask& task, int partition,
                                 const AttendTask* next_task, Scratch& scratch, const SoftmaxState& part) {
        const int rows = task.num_queries * spec.group_size(), per_block = block_rows(rows);
        const int start = partition * kPartitionTokens;
        const int num_blocks = (rows + per_block - 1) / per_block;
        const Keys keys(spec, task, partition, next_task);
        scratch.fetcher.begin_within(spec, keys);
        // A single block reads values in the order in which they lie; several keep the sums of all keys in registers.
        const int tokens_at_once = num_blocks == 1 ? kTokensAtOnce : kPartitionTokens;
        const auto block_at = [&](int i) {
            return row_block(spec, task, start, i * per_block, smaller((i + 1) * per_block, rows), kGroupTokens);
        };
        for (int i = 0; i < num_blocks + 2; ++i) {
            const bool weighs = i >= 1 && i <= num_blocks;
            const RowBlock weighed = block_at(weighs ? i - 1 : 0);
            const int parity = (i + 1) % 2;
            Weighing weighing{scratch.fetcher,
                              spec,
                              task,
                              weighed,
                              start,
                              scratch.scores[parity],
                              scratch.weights[parity],
                              part,
                              weighs ? weighed.begin : weighed.end};
            if (i < num_blocks) score(spec, scratch, keys, block_at(i), scratch.scores[i % 2], weighing);
            if (i >= 2) {
                const RowBlock block = block_at(i - 2);
                clear(spec, block, part);
                for (int token = block.lo / tokens_at_once * tokens_at_once; token < block.hi; token += tokens_at_once)
                    accumulate(spec, scratch, keys, block, larger(token, block.lo),
                               smaller(token + tokens_at_once, block.hi), scratch.weights[i % 2], part.out, weighing);
            }
            weighing.finish();
        }
    }

    static void clear(const AttentionSpec& spec, const RowBlock& block, const SoftmaxState& part) {
        const int64_t v_dim = spec.v_head_dim;
        __builtin_memset(part.out + block.begin * v_dim, 0, (block.end - block.begin) * v_dim * sizeof(float));
    }

    template <int N>
    struct Constant {
        constexpr int operator()() const { return N; }
    };

    // Calls f(n) with n, at most kMax, as a constant.
    template <int kMax, typename F>
    static void with_constant(int n, F&& f) {
        if constexpr (kMax > 1)
            if (n < kMax) return with_constant<kMax - 1>(n, f);
        f(Constant<kMax>{});
    }

    template <int R, int NV>
    static void score_groups(const AttentionSpec& spec, Fetch& fetcher, const Packed* q, const Elem* const* groups,
                             float* scores) {
        constexpr int kLines = (NV + kVectorsPerGroup - 1) / kVectorsPerGroup;
        const Elem* k[NV];
        for (int j = 0; j < NV; ++j) k[j] = groups[j / kVectorsPerGroup] + j % kVectorsPerGroup * kWidth * kPack;
        const int64_t k_stride = int64_t{spec.block_size} * kPack;
        V acc[R][NV];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int j = 0; j < NV; ++j) acc[r][j] = Simd::zero();
        int64_t offset = 0;
        for (int d = 0; d < spec.head_dim; d += kPack, offset += k_stride) {
            fetcher(kLines);
#pragma GCC unroll 2
            for (int sub = 0; sub < E::kSubSteps; ++sub) {
                typename E::Fragment key[NV];
#pragma GCC unroll 16
                for (int j = 0; j < NV; ++j) key[j] = E::fragment(k[j] + offset, sub);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const typename E::Operand query = E::operand(q + r * kQueryStride + d, sub);
#pragma GCC unroll 16
                    for (int j = 0; j < NV; ++j) acc[r][j] = E::multiply_add(acc[r][j], key[j], query);
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int j = 0; j < NV; ++j) Simd::store(scores + r * kRowStride + j * kWidth, acc[r][j]);
    }

    template <int R, int NV>
    static void accumulate_dims(const AttentionSpec& spec, Fetch& fetcher, const Packed* weights, const Keys& keys,
                                int key_begin, int key_end, int d, float* out) {
        constexpr int kLines = larger(1, NV * kWidth * kPack * int{sizeof(Elem)} / 64);
        const int64_t v_dim = spec.v_head_dim, v_stride = v_dim * kPack;
        V acc[R][NV];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int j = 0; j < NV; ++j) acc[r][j] = Simd::load(out + r * v_dim + j * kWidth);
        for (int token = key_begin & ~(kPack - 1); token < key_end;) {
            const int group = token / kGroupTokens, in_block = token % kGroupTokens;
            const int count = smaller(kGroupTokens - in_block, key_end - token);
            const int64_t offset = in_block * v_dim + int64_t{d} * kPack;
            const Elem* value = keys.v[group] + offset;
            const Packed* weight = weights + token;
            for (int i = count / kPack; i > 0; --i, value += v_stride, weight += kPack) {
                fetcher(kLines);
#pragma GCC unroll 2
                for (int sub = 0; sub < E::kSubSteps; ++sub) {
                    typename E::Fragment row[NV];
#pragma GCC unroll 16
                    for (int j = 0; j < NV; ++j) row[j] = E::fragment(value + j * kWidth * kPack, sub);
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) {
                        const typename E::Operand w = E::operand(weight + r * kRowStride, sub);
#pragma GCC unroll 16
                        for (int j = 0; j < NV; ++j) acc[r][j] = E::multiply_add(acc[r][j], row[j], w);
                    }
                }
            }
            // The partner of the last token may not be written yet.
            if (count % kPack != 0) {
#pragma GCC unroll 16
                for (int j = 0; j < NV; ++j) {
                    const typename E::Fragment last = E::first_of_fragment(value + j * kWidth * kPack);
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r)
                        acc[r][j] = E::multiply_add(acc[r][j], last, E::operand(weight + r * kRowStride, 0));
                }
            }
            token += count;
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int j = 0; j < NV; ++j) Simd::store(out + r * v_dim + j * kWidth, acc[r][j]);
    }
};

}  // namespace
}  // namespace swiftkv
