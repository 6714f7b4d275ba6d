#pragma once

// Softmax of rows of scores, and of partitions of them. Include after a simd_*.h; all of it has internal linkage.
#include "attention_keys.h"

namespace swiftkv {
namespace {

// The score of a key that a row does not see; finite, so that differences are never NaN.
constexpr float kLowest = -1e30f;

// The sums of weighted values of some rows. A key's weight is exp2((score - max) c).
struct SoftmaxState {
    float* max;  // [rows]; kLowest if a row saw no key
    float* sum;  // [rows], of weights
    float* out;  // [rows, v_head_dim]

    SoftmaxState(float* max, float* sum, float* out) : max(max), sum(sum), out(out) {}
    SoftmaxState(Arena& arena, int64_t rows, int v_head_dim)
        : max(arena.take<float>(rows)), sum(arena.take<float>(rows)), out(arena.take<float>(rows * v_head_dim)) {}

    SoftmaxState from(int64_t row, int v_head_dim) const { return {max + row, sum + row, out + row * v_head_dim}; }
};

template <typename E>
struct Softmax {
    using V = Simd::V;
    using Packed = typename E::Packed;
    static constexpr int kWidth = Simd::kLanes;

    // Returns 2^x for any x <= 0, -inf included.
    static float exp2_of(float x) {
        return Simd::first(exp2<E::kExpTerms>(Simd::max(Simd::set1(-127.0f), Simd::set1(x))));
    }

    // Returns the scale of exponents. Capped scores are kept as tanh(score / soft_cap), so the scale includes the cap.
    static float exponent_scale(const AttentionSpec& spec) {
        return (spec.soft_cap > 0 ? spec.soft_cap : spec.scale) * kLog2E;
    }

    static void cap(const AttentionSpec& spec, int begin, int end, float* scores) {
        const V c = Simd::set1(2 * kLog2E * spec.scale / spec.soft_cap);
        for (int t = begin; t < end; t += kWidth)
            Simd::store(scores + t, tanh_of_log2(Simd::mul(Simd::load(scores + t), c)));
    }

    static float largest(int begin, int end, const float* scores) {
        V a = Simd::load(scores + begin), b = a;
        for (int t = begin; t + kWidth < end; t += 2 * kWidth) {
            a = Simd::max(a, Simd::load(scores + t));
            b = Simd::max(b, Simd::load(scores + t + kWidth));
        }
        return Simd::largest(Simd::max(Simd::max(a, b), Simd::load(scores + end - kWidth)));
    }

    // Turns a row's scores [begin, end), which are whole vectors, into weights. Keys [lo, hi) are visible; the weights
    // of the others are exactly zero, so that a row's bits depend on neither `begin` nor `end`.
    static void weigh(const AttentionSpec& spec, int begin, int end, int lo, int hi, float* scores, Packed* weights,
                      float& max, float& sum) {
        max = kLowest;
        sum = 0.0f;
        if (lo >= hi) {
            for (int t = begin; t < end; t += kWidth) E::pack(weights + t, Simd::zero());
            return;
        }
        if (spec.soft_cap > 0) cap(spec, begin, end, scores);
        for (int t = begin; t < lo; ++t) scores[t] = kLowest;
        for (int t = hi; t < end; ++t) scores[t] = kLowest;
        max = largest(begin, end, scores);

        const float c = exponent_scale(spec);
        const V cs = Simd::set1(c), shift = Simd::set1(E::kWeightShift - max * c);
        const auto weight_at = [&](int t) { return E::weights_of(Simd::fma(Simd::load(scores + t), cs, shift)); };
        V sums = Simd::zero();
        int t = begin;
        for (; t + kWidth < end; t += 2 * kWidth) {
            const V first = weight_at(t), second = weight_at(t + kWidth);
            E::pack(weights + t, first, second);
            sums = Simd::add(Simd::add(sums, first), second);
        }
        if (t < end) {
            const V last = weight_at(t);
            E::pack(weights + t, last);
            sums = Simd::add(sums, last);
        }
        sum = Simd::sum(sums);
    }

    // A partition is added to earlier ones by multiplying the sums of weighted values of both by these factors.
    struct Factors {
        float total, part;
    };
    static Factors add_row(float c, float& max, float& sum, float part_max, float part_sum) {
        if (part_max == kLowest) return {1.0f, 0.0f};
        const float new_max = max > part_max ? max : part_max;
        const Factors factors{exp2_of((max - new_max) * c), exp2_of((part_max - new_max) * c)};
        max = new_max;
        sum = sum * factors.total + part_sum * factors.part;
        return factors;
    }
    static void add_values(const Factors& factors, int begin, int end, float* total, const float* part) {
        if (factors.part == 0.0f) return;
        const V a = Simd::set1(factors.total), b = Simd::set1(factors.part);
        for (int d = begin; d < end; d += kWidth)
            Simd::store(total + d, Simd::fma(Simd::load(part + d), b, Simd::mul(Simd::load(total + d), a)));
    }

    static void merge(const AttentionSpec& spec, const SoftmaxState& total, const SoftmaxState& part, int rows) {
        const float c = exponent_scale(spec);
        const int64_t v_dim = spec.v_head_dim;
        for (int row = 0; row < rows; ++row) {
            const Factors factors = add_row(c, total.max[row], total.sum[row], part.max[row], part.sum[row]);
            add_values(factors, 0, spec.v_head_dim, total.out + row * v_dim, part.out + row * v_dim);
        }
    }

    static void copy(const SoftmaxState& from, const SoftmaxState& to, int rows, int v_dim) {
        __builtin_memcpy(to.max, from.max, rows * sizeof(float));
        __builtin_memcpy(to.sum, from.sum, rows * sizeof(float));
        __builtin_memcpy(to.out, from.out, int64_t{rows} * v_dim * sizeof(float));
    }

    // Returns the factor that turns a row's sum of weighted values into their mean. A sink may exceed every score by
    // far, so exponents are relative to the larger of the two.
    static float normaliser(float max, float sum, const float* sink) {
        if (sink == nullptr) return 1.0f / sum;
        const float exponent = *sink * kLog2E, larger_one = max > exponent ? max : exponent;
        const float weight = exp2_of(max - larger_one);
        return weight / (sum * weight + exp2_of(exponent - larger_one));
    }

    static void write(const AttentionSpec& spec, const SoftmaxState& state, int rows, const float* sinks, void* out) {
        const int group_size = spec.group_size(), v_dim = spec.v_head_dim;
        const float c = exponent_scale(spec);
        for (int row = 0; row < rows; ++row) {
            const float* sink = sinks == nullptr ? nullptr : sinks + row % group_size;
            const V scale = Simd::set1(normaliser(state.max[row] * c, state.sum[row], sink));
            auto* to = static_cast<typename E::Elem*>(out) +
                       (int64_t{row} / group_size * spec.num_heads + row % group_size) * v_dim;
            const float* from = state.out + int64_t{row} * v_dim;
            // Adding zero turns -0 into 0: the sign of a zero depends on which masked keys were multiplied.
            for (int d = 0; d < v_dim; d += kWidth)
                E::store(to + d, Simd::add(Simd::mul(Simd::load(from + d), scale), Simd::zero()));
        }
    }
};

}  // namespace
}  // namespace swiftkv
