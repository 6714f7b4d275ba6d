#pragma once

// The step before attention: RMSNorm of the heads, rotary embedding, KV write. Include after a simd_*.h.
#include <algorithm>

#include "attention_element.h"

namespace swiftkv {
namespace {

template <typename E>
struct RopeWrite {
    using V = Simd::V;
    using Elem = typename E::Elem;
    static constexpr int kWidth = Simd::kLanes;
    static constexpr int kPack = E::kPack;
    // Vectors are read and written whole, so buffers have room for one more.
    static constexpr int kPadded = kMaxHeadDim + kWidth;
    static constexpr int kHeadsAtOnce = 16;

    struct Rotation {
        float cos[kPadded], sin[kPadded];
        int half;

        Rotation(const float* cos_sin, int rotary_dim) : half(rotary_dim / 2) {
            round_row(cos_sin, cos);
            round_row(cos_sin + half, sin);
        }

      private:
        void round_row(const float* from, float* to) const {
            for (int i = 0; i < half; ++i) to[i] = from[i];
            for (int i = half; i < round_up(half, kWidth); ++i) to[i] = 0.0f;
            for (int i = 0; i < half; i += kWidth) Simd::store(to + i, E::round(Simd::load(to + i)));
        }
    };

    static void widen(const void* from, int n, float* to) {
        for (int i = 0; i < n; i += kWidth) Simd::store(to + i, E::load(static_cast<const Elem*>(from) + i));
    }

    // The weights of a norm, and their kind (see ElementwiseKernels.rms_norm).
    struct Norm {
        alignas(64) float weight[kMaxHeadDim];
        NormWeight kind;
        float eps;

        Norm(const void* from, const RopeArgs& rope, int n) : kind(rope.norm_weight), eps(rope.eps) {
            if (from == nullptr) return;
            if (kind == NormWeight::kFloat32)
                __builtin_memcpy(weight, from, n * sizeof(float));
            else
                widen(from, n, weight);
        }
    };

    // Finds one over the root mean square of each head. Each takes a long chain of dependent operations, so those of
    // many heads are found before the first is used: the processor then works on several at a time.
    static void find_scales(const Elem* heads, int num_heads, const Norm& norm, int n, float* scales) {
        for (int head = 0; head < num_heads; ++head) {
            V squares = Simd::zero();
            for (int i = 0; i < n; i += kWidth) {
                const V x = E::load(heads + head * n + i);
                squares = Simd::fma(x, x, squares);
            }
            scales[head] = 1.0f / __builtin_sqrtf(Simd::sum(squares) / static_cast<float>(n) + norm.eps);
        }
    }

    // Normalises as transformers does: in float32, rounded unless the weight is float32, times the weight, rounded.
    static void normalise(const Elem* head, float head_scale, const Norm& norm, int n, float* x) {
        const V scale = Simd::set1(head_scale);
        for (int i = 0; i < n; i += kWidth) {
            const V wide = Simd::mul(E::load(head + i), scale);
            const V normal = norm.kind == NormWeight::kFloat32 ? wide : E::round(wide);
            Simd::store(x + i, E::round(Simd::mul(Simd::load(norm.weight + i), normal)));
        }
    }

    // Rotates as transformers does, which rounds each product and the sum: y = x cos + rotate_half(x) sin. Writes whole
    // vectors, so unless half of the rotated dimensions is a whole number of them, y needs room for one more.
    static void rotate(const float* x, const Rotation& rotation, int n, Elem* y) {
        const int half = rotation.half;
        for (int i = 0; i < half; i += kWidth) {
            const V a = Simd::load(x + i), b = Simd::load(x + half + i);
            const V left = E::round(Simd::mul(a, Simd::load(rotation.cos + i)));
            E::store(y + i, Simd::sub(left, E::round(Simd::mul(b, Simd::load(rotation.sin + i)))));
        }
        for (int i = 0; i < half; i += kWidth) {
            const V a = Simd::load(x + i), b = Simd::load(x + half + i);
            const V left = E::round(Simd::mul(b, Simd::load(rotation.cos + i)));
            E::store(y + half + i, Simd::add(left, E::round(Simd::mul(a, Simd::load(rotation.sin + i)))));
        }
        for (int i = 2 * half; i < n; i += kWidth) E::store(y + i, Simd::load(x + i));
    }

    // Normalises, unless `norm` is null, and rotates consecutive heads of a row.
    static void prepare_heads(Elem* heads, int num_heads, const Rotation& rotation, const Norm* norm, int n) {
        const bool whole_vectors = rotation.half % kWidth == 0;
        float scales[kHeadsAtOnce];
        alignas(64) float x[kPadded];
        alignas(64) Elem y[kPadded];
        for (int head = 0; head < num_heads; ++head, heads += n) {
            const int in_group = head % kHeadsAtOnce;
            if (norm == nullptr) {
                widen(heads, n, x);
            } else {
                if (in_group == 0) find_scales(heads, std::min(kHeadsAtOnce, num_heads - head), *norm, n, scales);
                normalise(heads, scales[in_group], *norm, n, x);
            }
            rotate(x, rotation, n, whole_vectors ? heads : y);
            if (!whole_vectors) __builtin_memcpy(heads, y, n * sizeof(Elem));
        }
    }

    // [num_tokens][head_dim] -> [head_dim / kPack][block_size][kPack]
    static void write_keys(const Elem* rows, int64_t row_stride, int num_tokens, int n, int64_t block_size, Elem* to) {
        for (int d = 0; d < n; d += kPack, to += block_size * kPack)
            for (int t = 0; t < num_tokens; ++t)
                __builtin_memcpy(to + t * kPack, rows + t * row_stride + d, kPack * sizeof(Elem));
    }

    // [num_tokens][head_dim] -> [block_size / kPack][head_dim][kPack], from token `in_block` of the block on
    static void write_values(const Elem* rows, int64_t row_stride, int num_tokens, int n, int in_block, Elem* block) {
        for (int t = 0; t < num_tokens;) {
            const Elem* row = rows + t * row_stride;
            const int token = in_block + t;
            Elem* to = block + int64_t{token / kPack} * n * kPack;
            if constexpr (kPack == 2) {
                if (token % 2 == 0 && t + 1 < num_tokens) {
                    for (int d = 0; d < n; ++d) {
                        to[2 * d] = row[d];
                        to[2 * d + 1] = row[row_stride + d];
                    }
                    t += 2;
                    continue;
                }
            }
            for (int d = 0; d < n; ++d) to[d * kPack + token % kPack] = row[d];
            ++t;
        }
    }

    static void run(const AttentionSpec& spec, const RopeArgs& rope, const RopeTask& task) {
        const int n = spec.head_dim;
        const int64_t row_stride = spec.row_elements();
        auto* rows = static_cast<Elem*>(task.rows);
        const Norm q_norm(rope.q_norm, rope, n), k_norm(rope.k_norm, rope, n);
        for (int t = 0; t < task.num_tokens; ++t) {
            const Rotation rotation(rope.cos_sin + int64_t{task.positions[t]} * rope.rotary_dim, rope.rotary_dim);
            Elem* row = rows + t * row_stride;
            prepare_heads(row, spec.num_heads, rotation, rope.q_norm != nullptr ? &q_norm : nullptr, n);
            prepare_heads(row + spec.num_heads * n, spec.num_kv_heads, rotation,
                          rope.k_norm != nullptr ? &k_norm : nullptr, n);
        }
        auto* block = reinterpret_cast<Elem*>(task.layer_block);
        const int v_dim = spec.v_head_dim;
        const Elem* k = rows + int64_t{spec.num_heads} * n;
        const Elem* v = k + int64_t{spec.num_kv_heads} * n;
        for (int head = 0; head < spec.num_kv_heads; ++head, k += n, v += v_dim) {
            write_keys(k, row_stride, task.num_tokens, n, spec.block_size,
                       block + spec.k_offset(head) + task.offset_in_block * kPack);
            write_values(v, row_stride, task.num_tokens, v_dim, task.offset_in_block, block + spec.v_offset(head));
        }
    }
};

}  // namespace
}  // namespace swiftkv
