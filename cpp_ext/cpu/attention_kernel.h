#pragma once

// The kernels of attention.h for one instruction set. Include after a simd_*.h; all of it has internal linkage. It is
// one file, because a piece of it alone compiles for no instruction set, and is read with the tile that it fills.
#include "attention_element.h"
#include "attention_rope.h"

namespace swiftkv {
namespace {

constexpr int kBlockRows = 6;  // rows whose accumulators fill the registers
constexpr int kTileGroups = kTileTokens / kGroupTokens;
constexpr float kLowest = -1e30f;  // running maximum before the first key; finite so that differences are never NaN

// Hands out aligned pieces of a thread's scratch; run with nullptr it only measures.
class Arena {
  public:
    explicit Arena(std::byte* base) : base_(base) {}

    template <typename T>
    T* take(int64_t count) {
        T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
        used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
        return piece;
    }
    int64_t used() const { return used_; }

  private:
    std::byte* base_;
    int64_t used_ = 0;
};

// Online softmax of some rows: out = sum(exp2((s - max) c) v), sum = sum(exp2((s - max) c)).
struct SoftmaxState {
    float* max;  // [rows]
    float* sum;  // [rows]
    float* out;  // [rows, v_head_dim]
};

template <typename E>
struct Attention {
    using V = Simd::V;
    using Elem = typename E::Elem;
    using Packed = typename E::Packed;
    static constexpr int kWidth = Simd::kLanes;
    static constexpr int kPack = E::kPack;
    static constexpr int kVectorsPerGroup = kGroupTokens / kWidth;
    static constexpr int kVectorsPerTile = kTileTokens / kWidth;
    // Vectors beside kBlockRows rows of accumulators: 24 of 32 registers, or 12 of 16.
    static constexpr int kBlockVectors = kWidth == 16 ? 4 : 2;
    static constexpr int kBlockGroups = kBlockVectors / kVectorsPerGroup;

    struct Scratch {
        Packed* q;           // [row blocks][head_dim / kPack][rows of the block][kPack]
        SoftmaxState total;  // of the partitions so far
        SoftmaxState part;
        float* lane_sums;  // [rows, kWidth], of part
        float* scores;     // [kBlockRows, kTileTokens]
        Packed* weights;   // [kBlockRows, kTileTokens]

        Scratch(Arena& arena, const AttentionSpec& spec, int64_t rows) {
            q = arena.take<Packed>(rows * spec.head_dim);
            for (SoftmaxState* state : {&total, &part}) {
                state->max = arena.take<float>(rows);
                state->sum = arena.take<float>(rows);
                state->out = arena.take<float>(rows * spec.v_head_dim);
            }
            lane_sums = arena.take<float>(rows * kWidth);
            scores = arena.take<float>(kBlockRows * kTileTokens);
            weights = arena.take<Packed>(kBlockRows * kTileTokens);
        }
    };

    // The addresses of a tile's keys and values, group by group; invisible groups point at a visible one.
    struct Tile {
        int start;
        const Elem* k[kTileGroups];
        const Elem* v[kTileGroups];
    };

    // Rows [begin, end) of a task, a row being query * group_size + query head.
    struct RowBlock {
        int begin, end;
        int first_query, last_query;  // positions
    };

    // Upper limits of scores: -inf where a key is invisible, +inf where it is visible. Simd::min of a NaN and a limit
    // is the limit.
    struct Infinities {
        float from[2 * kTileTokens], until[2 * kTileTokens];

        constexpr Infinities() : from{}, until{} {
            for (int i = 0; i < 2 * kTileTokens; ++i) {
                from[i] = i < kTileTokens ? -__builtin_inff() : __builtin_inff();
                until[i] = -from[i];
            }
        }
    };
    static constexpr Infinities kInfinities{};
    static int clamp_to_tile(int token) { return larger(0, smaller(token, kTileTokens)); }

    static float exp2_of(float x) { return Simd::first(exp2<E::kExpTerms>(Simd::set1(x))); }

    // After scores are capped they are tanh(score / soft_cap), so the cap goes into the exponents' scale.
    static float exponent_scale(const AttentionSpec& spec) {
        return (spec.soft_cap > 0 ? spec.soft_cap : spec.scale) * kLog2E;
    }

    // Caps the scores of R rows from group `group_begin` to key `end` of a tile.
    template <int R>
    static void cap_scores(const AttentionSpec& spec, int group_begin, int end, float* scores) {
        const V c = Simd::set1(2 * kLog2E * spec.scale / spec.soft_cap);
        for (int r = 0; r < R; ++r, scores += kTileTokens)
            for (int t = group_begin * kGroupTokens; t < end; t += kWidth)
                Simd::store(scores + t, tanh_of_log2(Simd::mul(Simd::load(scores + t), c)));
    }

    // scores[r, t] = q[r] . k[t] for NV vectors of keys.
    template <int R, int NV, bool kPrefetch>
    static void score(const Packed* q, const Elem* const* k, const Elem* const* next_k, int64_t k_stride, int steps,
                      float* scores) {
        V acc[R][NV];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) acc[r][j] = Simd::zero();
        int64_t offset = 0;
        for (int step = 0; step < steps; ++step, offset += k_stride, q += R * kPack) {
            typename E::Fragment key[NV];
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) {
                key[j] = E::fragment(k[j] + offset);
                if constexpr (kPrefetch) __builtin_prefetch(next_k[j] + offset, 0, 3);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const typename E::Operand query = E::operand(q + r * kPack);
#pragma GCC unroll 8
                for (int j = 0; j < NV; ++j) acc[r][j] = E::multiply_add(acc[r][j], key[j], query);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) Simd::store(scores + r * kTileTokens + j * kWidth, acc[r][j]);
    }

    template <int R, bool kPrefetch>
    static void score_groups(const Packed* q, const Tile& tile, const Tile& next, int group_begin, int group_end,
                             int64_t k_stride, int steps, float* scores) {
        for (int group = group_begin; group < group_end; group += kBlockGroups) {
            const Elem* k[kBlockVectors];
            const Elem* next_k[kBlockVectors];
            const int num_vectors = smaller(kBlockGroups, group_end - group) * kVectorsPerGroup;
            for (int j = 0; j < num_vectors; ++j) {
                const int lane = j % kVectorsPerGroup * kWidth * kPack;
                k[j] = tile.k[group + j / kVectorsPerGroup] + lane;
                next_k[j] = next.k[group + j / kVectorsPerGroup] + lane;
            }
            float* out = scores + group * kGroupTokens;
            switch (num_vectors) {
                case 1:
                    score<R, 1, kPrefetch>(q, k, next_k, k_stride, steps, out);
                    break;
                case 2:
                    score<R, 2, kPrefetch>(q, k, next_k, k_stride, steps, out);
                    break;
                case 3:
                    score<R, smaller(3, kBlockVectors), kPrefetch>(q, k, next_k, k_stride, steps, out);
                    break;
                default:
                    score<R, kBlockVectors, kPrefetch>(q, k, next_k, k_stride, steps, out);
                    break;
            }
        }
    }

    // Updates a row's online softmax with the scores of a tile, of which keys [lo, hi) are visible. Stores the weights
    // and returns the factor for the row's output so far.
    template <bool kMasked>
    static float update_softmax(const float* scores, int lo, int hi, float c, float& running_max, float* lane_sums,
                                Packed* weights) {
        [[maybe_unused]] const float* from_lo = kInfinities.from + kTileTokens - clamp_to_tile(lo);
        [[maybe_unused]] const float* until_hi = kInfinities.until + kTileTokens - clamp_to_tile(hi);
        V s[kVectorsPerTile];
#pragma GCC unroll 8
        for (int j = 0; j < kVectorsPerTile; ++j) {
            s[j] = Simd::load(scores + j * kWidth);
            if constexpr (kMasked)
                s[j] = Simd::min(s[j], Simd::min(Simd::load(from_lo + j * kWidth), Simd::load(until_hi + j * kWidth)));
        }
        V m[kVectorsPerTile];
#pragma GCC unroll 8
        for (int j = 0; j < kVectorsPerTile; ++j) m[j] = s[j];
#pragma GCC unroll 4
        for (int n = kVectorsPerTile / 2; n > 0; n /= 2)
#pragma GCC unroll 4
            for (int j = 0; j < n; ++j) m[j] = Simd::max(m[j], m[j + n]);
        const float tile_max = Simd::largest(m[0]);
        const float old_max = running_max;
        const float new_max = tile_max > old_max ? tile_max : old_max;
        running_max = new_max;

        const V cs = Simd::set1(c), shift = Simd::set1(-(new_max * c));
        V p[kVectorsPerTile];
#pragma GCC unroll 8
        for (int j = 0; j < kVectorsPerTile; ++j) {
            p[j] = exp2<E::kExpTerms>(Simd::fma(s[j], cs, shift));
            E::pack(weights + j * kWidth, p[j]);
        }
#pragma GCC unroll 4
        for (int n = kVectorsPerTile / 2; n > 0; n /= 2)
#pragma GCC unroll 4
            for (int j = 0; j < n; ++j) p[j] = Simd::add(p[j], p[j + n]);
        if (new_max == old_max) {
            Simd::store(lane_sums, Simd::add(Simd::load(lane_sums), p[0]));
            return 1.0f;
        }
        const float alpha = exp2_of((old_max - new_max) * c);
        Simd::store(lane_sums, Simd::fma(Simd::load(lane_sums), Simd::set1(alpha), p[0]));
        return alpha;
    }

    // out[r, d] = alpha[r] * out[r, d] + weights[r] . v[:, d] for NV vectors of d and tokens [begin, end) of the tile;
    // begin is even.
    template <int R, int NV, bool kPrefetch>
    static void accumulate(const Packed* weights, const Elem* const* v, const Elem* const* next_v, int begin, int end,
                           int64_t v_dim, const float* alpha, float* out) {
        V acc[R][NV];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j)
                acc[r][j] = Simd::mul(Simd::set1(alpha[r]), Simd::load(out + r * v_dim + j * kWidth));
        const int64_t v_stride = v_dim * kPack;
        for (int token = begin; token < end;) {
            const int group = token / kGroupTokens, in_block = token % kGroupTokens;
            const int count = smaller(kGroupTokens - in_block, end - token);
            const Elem* value = v[group] + in_block * v_dim;
            [[maybe_unused]] const Elem* next_value = next_v[group] + in_block * v_dim;
            const Packed* weight = weights + token;
            for (int i = count / kPack; i > 0; --i, value += v_stride, next_value += v_stride, weight += kPack) {
                typename E::Fragment row[NV];
#pragma GCC unroll 8
                for (int j = 0; j < NV; ++j) {
                    row[j] = E::fragment(value + j * kWidth * kPack);
                    if constexpr (kPrefetch) __builtin_prefetch(next_value + j * kWidth * kPack, 0, 3);
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const typename E::Operand w = E::operand(weight + r * kTileTokens);
#pragma GCC unroll 8
                    for (int j = 0; j < NV; ++j) acc[r][j] = E::multiply_add(acc[r][j], row[j], w);
                }
            }
            // The partner of the last token may not be written yet.
            if (count % kPack != 0) {
#pragma GCC unroll 8
                for (int j = 0; j < NV; ++j) {
                    const typename E::Fragment last = E::first_of_fragment(value + j * kWidth * kPack);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r)
                        acc[r][j] = E::multiply_add(acc[r][j], last, E::operand(weight + r * kTileTokens));
                }
            }
            token += count;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) Simd::store(out + r * v_dim + j * kWidth, acc[r][j]);
    }

    template <int R, bool kPrefetch>
    static void accumulate_dims(const Packed* weights, const Tile& tile, const Tile& next, int begin, int end,
                                int v_dim, const float* alpha, float* out) {
        for (int d = 0; d < v_dim; d += kBlockVectors * kWidth) {
            const Elem* v[kTileGroups];
            const Elem* next_v[kTileGroups];
            for (int g = 0; g < kTileGroups; ++g) {
                v[g] = tile.v[g] + d * kPack;
                next_v[g] = next.v[g] + d * kPack;
            }
            switch (smaller(kBlockVectors, (v_dim - d) / kWidth)) {
                case 1:
                    accumulate<R, 1, kPrefetch>(weights, v, next_v, begin, end, v_dim, alpha, out + d);
                    break;
                case 2:
                    accumulate<R, 2, kPrefetch>(weights, v, next_v, begin, end, v_dim, alpha, out + d);
                    break;
                case 3:
                    accumulate<R, smaller(3, kBlockVectors), kPrefetch>(weights, v, next_v, begin, end, v_dim, alpha,
                                                                        out + d);
                    break;
                default:
                    accumulate<R, kBlockVectors, kPrefetch>(weights, v, next_v, begin, end, v_dim, alpha, out + d);
                    break;
            }
        }
    }

    // Brings R rows up to date with a tile.
    template <int R, bool kPrefetch>
    static void attend_tile(const AttentionSpec& spec, const AttendTask& task, const Tile& tile, const Tile& next,
                            const RowBlock& rows, Scratch& scratch) {
        const int lo = larger(spec.first_visible(rows.first_query) - tile.start, 0);
        const int hi = smaller(rows.last_query + 1 - tile.start, kTileTokens);
        if (lo >= hi) return;
        const bool masked =
            rows.first_query + 1 < tile.start + kTileTokens || spec.first_visible(rows.last_query) > tile.start;

        const int head_dim = spec.head_dim;
        score_groups<R, kPrefetch>(scratch.q + int64_t{rows.begin} * head_dim, tile, next, lo / kGroupTokens,
                                   (hi + kGroupTokens - 1) / kGroupTokens, int64_t{spec.block_size} * kPack,
                                   head_dim / kPack, scratch.scores);
        if (spec.soft_cap > 0) cap_scores<R>(spec, lo / kGroupTokens, hi, scratch.scores);
        const float c = exponent_scale(spec);
        float alpha[R];
        for (int r = 0; r < R; ++r) {
            const int row = rows.begin + r;
            const float* scores = scratch.scores + r * kTileTokens;
            Packed* weights = scratch.weights + r * kTileTokens;
            float* lane_sums = scratch.lane_sums + row * kWidth;
            if (!masked) {
                alpha[r] = update_softmax<false>(scores, 0, 0, c, scratch.part.max[row], lane_sums, weights);
                continue;
            }
            const int query = task.first_position + row / spec.group_size();
            alpha[r] = update_softmax<true>(scores, spec.first_visible(query) - tile.start, query + 1 - tile.start, c,
                                            scratch.part.max[row], lane_sums, weights);
        }
        accumulate_dims<R, kPrefetch>(scratch.weights, tile, next, lo & ~(kPack - 1), hi, spec.v_head_dim, alpha,
                                      scratch.part.out + int64_t{rows.begin} * spec.v_head_dim);
    }

    template <bool kPrefetch>
    static void attend_tile(const AttentionSpec& spec, const AttendTask& task, const Tile& tile, const Tile& next,
                            const RowBlock& rows, Scratch& scratch) {
        switch (rows.end - rows.begin) {
            case 1:
                return attend_tile<1, kPrefetch>(spec, task, tile, next, rows, scratch);
            case 2:
                return attend_tile<2, kPrefetch>(spec, task, tile, next, rows, scratch);
            case 3:
                return attend_tile<3, kPrefetch>(spec, task, tile, next, rows, scratch);
            case 4:
                return attend_tile<4, kPrefetch>(spec, task, tile, next, rows, scratch);
            case 5:
                return attend_tile<5, kPrefetch>(spec, task, tile, next, rows, scratch);
            default:
                return attend_tile<kBlockRows, kPrefetch>(spec, task, tile, next, rows, scratch);
        }
    }

    // The range of keys that some query of the task sees.
    static int visible_begin(const AttentionSpec& spec, const AttendTask& task) {
        return spec.first_visible(task.first_position);
    }
    static int visible_end(const AttendTask& task) { return task.first_position + task.num_queries; }

    // Keys of the task before a partition's end.
    static int keys_end(const AttendTask& task, int partition_end) {
        return smaller(visible_end(task), partition_end * kPartitionTokens);
    }
    static int first_tile(const AttentionSpec& spec, const AttendTask& task, int partition) {
        return larger(visible_begin(spec, task), partition * kPartitionTokens) / kTileTokens * kTileTokens;
    }

    // Only visible groups are looked up: the others are not in the table, or in blocks already freed.
    static Tile find_tile(const AttentionSpec& spec, const AttendTask& task, int start) {
        Tile tile;
        tile.start = start;
        const int first = larger(visible_begin(spec, task) - start, 0) / kGroupTokens;
        const int last = (smaller(visible_end(task) - start, kTileTokens) - 1) / kGroupTokens;
        for (int group = first; group <= last; ++group) {
            const int position = start + group * kGroupTokens;
            const auto* block =
                reinterpret_cast<const Elem*>(task.kv.layer_block(task.table[position / spec.block_size]));
            const int64_t in_block = position % spec.block_size;
            tile.k[group] = block + spec.k_offset(task.kv_head) + in_block * kPack;
            tile.v[group] = block + spec.v_offset(task.kv_head) + in_block * spec.v_head_dim;
        }
        for (int group = 0; group < kTileGroups; ++group) {
            if (group >= first && group <= last) continue;
            tile.k[group] = tile.k[first];
            tile.v[group] = tile.v[first];
        }
        return tile;
    }

    static RowBlock row_block(const AttentionSpec& spec, const AttendTask& task, int begin, int end) {
        return {begin, end, task.first_position + begin / spec.group_size(),
                task.first_position + (end - 1) / spec.group_size()};
    }

    // Row blocks of equal size but for the last.
    static int block_rows(int rows) {
        const int num_blocks = (rows + kBlockRows - 1) / kBlockRows;
        return (rows + num_blocks - 1) / num_blocks;
    }

    static void pack_queries(const AttentionSpec& spec, const AttendTask& task, Packed* packed) {
        const int group_size = spec.group_size(), head_dim = spec.head_dim, rows = task.num_queries * group_size;
        const int per_block = block_rows(rows);
        for (int row = 0; row < rows; ++row) {
            const Elem* q = static_cast<const Elem*>(task.q) + row / group_size * spec.row_elements() +
                            row % group_size * int64_t{head_dim};
            const int block = row / per_block * per_block, width = smaller(per_block, rows - block);
            Packed* out = packed + int64_t{block} * head_dim + (row - block) * kPack;
            alignas(64) Packed values[kMaxHeadDim];
            for (int d = 0; d < head_dim; d += kWidth) E::pack(values + d, E::load(q + d));
            for (int d = 0; d < head_dim; d += kPack, out += width * kPack)
                for (int i = 0; i < kPack; ++i) out[i] = values[d + i];
        }
    }

    static void reset(const Scratch& scratch, int rows, int v_dim) {
        for (int row = 0; row < rows; ++row) scratch.part.max[row] = kLowest;
        for (int i = 0; i < rows * kWidth; i += kWidth) Simd::store(scratch.lane_sums + i, Simd::zero());
        for (int i = 0; i < rows * v_dim; i += kWidth) Simd::store(scratch.part.out + i, Simd::zero());
    }

    // Attends to keys [lo, hi) of one partition; the result goes to scratch.part.
    static void attend_partition(const AttentionSpec& spec, const AttendTask& task, int partition,
                                 const AttendTask& next_task, Scratch& scratch) {
        const int rows = task.num_queries * spec.group_size(), per_block = block_rows(rows);
        reset(scratch, rows, spec.v_head_dim);
        const int end = keys_end(task, partition + 1), end_of_task = keys_end(task, task.partition_end);
        Tile tile = find_tile(spec, task, first_tile(spec, task, partition));
        while (true) {
            const int next_start = tile.start + kTileTokens;
            const Tile next = next_start < end_of_task
                                  ? find_tile(spec, task, next_start)
                                  : find_tile(spec, next_task, first_tile(spec, next_task, next_task.partition_begin));
            for (int begin = 0; begin < rows; begin += per_block) {
                const RowBlock block = row_block(spec, task, begin, smaller(begin + per_block, rows));
                if (begin == 0)  // the first to see a tile fetches the next one
                    attend_tile<true>(spec, task, tile, next, block, scratch);
                else
                    attend_tile<false>(spec, task, tile, next, block, scratch);
            }
            if (next_start >= end) break;
            tile = next;
        }
        for (int row = 0; row < rows; ++row)
            scratch.part.sum[row] = Simd::sum(Simd::load(scratch.lane_sums + row * kWidth));
    }

    static void merge_into(const AttentionSpec& spec, const SoftmaxState& total, const SoftmaxState& part, int rows) {
        const float c = exponent_scale(spec);
        const int v_dim = spec.v_head_dim;
        for (int row = 0; row < rows; ++row) {
            if (part.max[row] == kLowest) continue;
            const float new_max = total.max[row] > part.max[row] ? total.max[row] : part.max[row];
            const float a = exp2_of((total.max[row] - new_max) * c), b = exp2_of((part.max[row] - new_max) * c);
            total.max[row] = new_max;
            total.sum[row] = total.sum[row] * a + part.sum[row] * b;
            float* out = total.out + int64_t{row} * v_dim;
            const float* more = part.out + int64_t{row} * v_dim;
            for (int d = 0; d < v_dim; d += kWidth)
                Simd::store(out + d, Simd::fma(Simd::load(more + d), Simd::set1(b),
                                               Simd::mul(Simd::load(out + d), Simd::set1(a))));
        }
    }

    static void copy_state(const SoftmaxState& from, const SoftmaxState& to, int rows, int v_dim) {
        __builtin_memcpy(to.max, from.max, rows * sizeof(float));
        __builtin_memcpy(to.sum, from.sum, rows * sizeof(float));
        __builtin_memcpy(to.out, from.out, int64_t{rows} * v_dim * sizeof(float));
    }

    // The factor that makes a row's sum of weighted values their mean. A sink may exceed every score by far: the larger
    // of the two is what exponents are relative to.
    static float normaliser(float max, float sum, const float* sink) {
        if (sink == nullptr) return 1.0f / sum;
        const float exponent = *sink * kLog2E, larger_one = max > exponent ? max : exponent;
        const float weight = exp2_of(max - larger_one);
        return weight / (sum * weight + exp2_of(exponent - larger_one));
    }

    static void write_out(const AttentionSpec& spec, const SoftmaxState& state, int rows, const float* sinks,
                          void* out) {
        const int group_size = spec.group_size(), v_dim = spec.v_head_dim;
        const float c = exponent_scale(spec);
        for (int row = 0; row < rows; ++row) {
            const float* sink = sinks == nullptr ? nullptr : sinks + row % group_size;
            const V scale = Simd::set1(normaliser(state.max[row] * c, state.sum[row], sink));
            Elem* to =
                static_cast<Elem*>(out) + (int64_t{row} / group_size * spec.num_heads + row % group_size) * v_dim;
            const float* from = state.out + int64_t{row} * v_dim;
            // Adding zero turns -0 into 0: the sign of a zero depends on which masked keys were multiplied.
            for (int d = 0; d < v_dim; d += kWidth)
                E::store(to + d, Simd::add(Simd::mul(Simd::load(from + d), scale), Simd::zero()));
        }
    }

    static SoftmaxState partial_state(float* partial, int rows) {
        return {partial, partial + rows, partial + 2 * rows};
    }

    static void attend(const AttentionSpec& spec, const AttendTask& task, const AttendTask& next_task,
                       std::byte* memory) {
        const int rows = task.num_queries * spec.group_size();
        Arena arena(memory);
        Scratch scratch(arena, spec, rows);
        pack_queries(spec, task, scratch.q);
        if (task.partial != nullptr) scratch.part = partial_state(task.partial, rows);
        for (int p = task.partition_begin; p < task.partition_end; ++p) {
            attend_partition(spec, task, p, next_task, scratch);
            if (task.partial != nullptr) return;
            if (p == task.partition_begin)
                copy_state(scratch.part, scratch.total, rows, spec.v_head_dim);
            else
                merge_into(spec, scratch.total, scratch.part, rows);
        }
        write_out(spec, scratch.total, rows, task.sinks, task.out);
    }

    static void merge(const AttentionSpec& spec, const MergeTask& task, std::byte* memory) {
        const int rows = task.num_queries * spec.group_size();
        const int64_t floats = int64_t{rows} * (spec.v_head_dim + 2);
        Arena arena(memory);
        Scratch scratch(arena, spec, rows);
        auto* partials = const_cast<float*>(task.partials);
        copy_state(partial_state(partials, rows), scratch.total, rows, spec.v_head_dim);
        for (int p = 1; p < task.num_partitions; ++p)
            merge_into(spec, scratch.total, partial_state(partials + p * floats, rows), rows);
        write_out(spec, scratch.total, rows, task.sinks, task.out);
    }

    static int64_t scratch_bytes(const AttentionSpec& spec, int num_queries) {
        Arena arena(nullptr);
        Scratch(arena, spec, int64_t{num_queries} * spec.group_size());
        return arena.used();
    }

    static constexpr AttentionKernels kKernels{scratch_bytes, attend, merge, RopeWrite<E>::run};
};

[[maybe_unused]] const AttentionKernels& kernels_of(DType dtype) {
    switch (dtype) {
        case DType::kF32:
            return Attention<Float32>::kKernels;
        case DType::kF16:
            return Attention<Float16>::kKernels;
        default:
            return Attention<BFloat16>::kKernels;
    }
}

}  // namespace
}  // namespace swiftkv
