#pragma once

#include "elementwise.h"

// Include after a simd_*.h; all of it has internal linkage.
namespace {

using swiftkv::DType;
using swiftkv::Epilogue;
using swiftkv::NormWeight;
using V = Simd::V;

template <DType kType>
struct Element;
template <>
struct Element<DType::kF32> {
    using T = float;
    static V load(const T* p) { return Simd::load(p); }
    static void store(T* p, V x) { Simd::store(p, x); }
};
template <>
struct Element<DType::kBf16> {
    using T = uint16_t;
    static V load(const T* p) { return Simd::load_bf16(p); }
    static void store(T* p, V x) { Simd::store_bf16(p, x); }
};
template <>
struct Element<DType::kF16> {
    using T = uint16_t;
    static V load(const T* p) { return Simd::load_f16(p); }
    static void store(T* p, V x) { Simd::store_f16(p, x); }
};

// Elements past `count` read as zero.
template <DType kType>
V load_some(const typename Element<kType>::T* p, int64_t count) {
    if (count >= Simd::kLanes) return Element<kType>::load(p);
    typename Element<kType>::T padded[Simd::kLanes] = {};
    for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
    return Element<kType>::load(padded);
}

template <DType kType>
void store_some(typename Element<kType>::T* p, V x, int64_t count) {
    if (count >= Simd::kLanes) return Element<kType>::store(p, x);
    typename Element<kType>::T padded[Simd::kLanes];
    Element<kType>::store(padded, x);
    for (int64_t i = 0; i < count; ++i) p[i] = padded[i];
}

template <DType kType>
V rounded(V x) {
    typename Element<kType>::T bits[Simd::kLanes];
    Element<kType>::store(bits, x);
    return Element<kType>::load(bits);
}
template <>
V rounded<DType::kF32>(V x) {
    return x;
}

// exp to within 2 units in the last place; arguments beyond +-87 saturate.
V exp(V x) {
    x = Simd::min(Simd::set1(87.0f), Simd::max(Simd::set1(-87.0f), x));  // x comes second, so that a NaN passes
    const V n = Simd::round(Simd::mul(x, Simd::set1(1.44269504f)));
    V r = Simd::fma(n, Simd::set1(-0.693145752f), x);
    r = Simd::fma(n, Simd::set1(-1.42860677e-6f), r);
    V p = Simd::set1(1.0f / 720);
    p = Simd::fma(p, r, Simd::set1(1.0f / 120));
    p = Simd::fma(p, r, Simd::set1(1.0f / 24));
    p = Simd::fma(p, r, Simd::set1(1.0f / 6));
    p = Simd::fma(p, r, Simd::set1(0.5f));
    p = Simd::fma(p, r, Simd::set1(1.0f));
    p = Simd::fma(p, r, Simd::set1(1.0f));
    return Simd::scale(p, n);
}

template <DType kType, DType kOut, NormWeight kWeight>
void rms_norm_as(const void* x_bytes, const void* weight_bytes, float eps, int64_t k, void* out_bytes) {
    const auto* x = static_cast<const typename Element<kType>::T*>(x_bytes);
    constexpr DType kWeightType = kWeight == NormWeight::kFloat32 ? DType::kF32 : kType;
    const auto* weight = static_cast<const typename Element<kWeightType>::T*>(weight_bytes);
    auto* out = static_cast<typename Element<kOut>::T*>(out_bytes);
    V squares[2] = {Simd::zero(), Simd::zero()};
    for (int64_t i = 0, odd = 0; i < k; i += Simd::kLanes, odd ^= 1) {
        const V v = load_some<kType>(x + i, k - i);
        squares[odd] = Simd::fma(v, v, squares[odd]);
    }
    const float mean = Simd::sum(Simd::add(squares[0], squares[1])) / static_cast<float>(k);
    const V scale = Simd::set1(1.0f / __builtin_sqrtf(mean + eps));
    for (int64_t i = 0; i < k; i += Simd::kLanes) {
        V normal = Simd::mul(load_some<kType>(x + i, k - i), scale);
        if constexpr (kWeight == NormWeight::kSameDType) normal = rounded<kType>(normal);
        const V scaled = Simd::mul(normal, load_some<kWeightType>(weight + i, k - i));
        store_some<kOut>(out + i, rounded<kType>(scaled), k - i);
    }
}

template <DType kType, NormWeight kWeight>
void rms_norm(const void* x, const void* weight, float eps, int64_t k, void* out) {
    rms_norm_as<kType, kType, kWeight>(x, weight, eps, k, out);
}

template <DType kType, NormWeight kWeight>
void rms_norm_widen(const void* x, const void* weight, float eps, int64_t k, float* out) {
    rms_norm_as<kType, DType::kF32, kWeight>(x, weight, eps, k, out);
}

template <DType kType>
void widen(const void* x_bytes, int64_t k, float* out) {
    const auto* x = static_cast<const typename Element<kType>::T*>(x_bytes);
    for (int64_t i = 0; i < k; i += Simd::kLanes)
        store_some<DType::kF32>(out + i, load_some<kType>(x + i, k - i), k - i);
}

V biased(const float* sums, const float* bias, int64_t i) {
    return bias == nullptr ? Simd::load(sums + i) : Simd::add(Simd::load(sums + i), Simd::load(bias + i));
}

V sigmoid(V x) {
    return Simd::div(Simd::set1(1.0f), Simd::add(Simd::set1(1.0f), exp(Simd::sub(Simd::zero(), x))));
}

// A NaN in `gate` or `up` passes: min and max return their second operand if one of the two is NaN.
V activate(V gate, V up, const swiftkv::GatedActivation& gated) {
    const V limit = Simd::set1(gated.limit);
    const V least = Simd::set1(-gated.limit);
    gate = Simd::min(limit, gate);
    up = Simd::add(Simd::max(least, Simd::min(limit, up)), Simd::set1(gated.up_offset));
    V slope = Simd::set1(-gated.alpha);
    if (gated.cubic != 0.0f) slope = Simd::fma(Simd::mul(gate, gate), Simd::set1(-gated.cubic), slope);
    const V e = exp(Simd::mul(slope, gate));
    return Simd::mul(Simd::div(gate, Simd::add(Simd::set1(1.0f), e)), up);
}

template <Epilogue kKind, DType kType>
void finish_vector(const float* sums, const float* bias, int64_t panel_width, int64_t i, int64_t count,
                   const swiftkv::GatedActivation& gated, typename Element<kType>::T* out) {
    V y = biased(sums, bias, i);
    if constexpr (kKind == Epilogue::kResidual) y = Simd::add(y, load_some<kType>(out + i, count));
    if constexpr (kKind == Epilogue::kGated) y = activate(y, biased(sums, bias, panel_width / 2 + i), gated);
    store_some<kType>(out + i, y, count);
}

template <Epilogue kKind, DType kType>
void finish(const float* sums, int64_t rows, const float* bias, int64_t panel_width, int64_t count,
            const swiftkv::GatedActivation& gated, void* out_bytes, int64_t out_stride_bytes) {
    for (int64_t r = 0; r < rows; ++r) {
        const float* row = sums + r * panel_width;
        auto* out = reinterpret_cast<typename Element<kType>::T*>(static_cast<char*>(out_bytes) + r * out_stride_bytes);
        int64_t i = 0;
        for (; i + Simd::kLanes <= count; i += Simd::kLanes)
            finish_vector<kKind, kType>(row, bias, panel_width, i, Simd::kLanes, gated, out);
        if (i < count) finish_vector<kKind, kType>(row, bias, panel_width, i, count - i, gated, out);
    }
}

// Adds whole cache lines of one row after the other, because rows compete for the same places of a small cache.
template <DType kType, int kVectors>
void add_weighted_part(const void* const* rows, const float* weights, int64_t count, int64_t begin, int64_t k,
                       typename Element<kType>::T* out) {
    V sums[kVectors];
    for (int v = 0; v < kVectors; ++v) sums[v] = Simd::zero();
    for (int64_t r = 0; r < count; ++r) {
        const auto* row = static_cast<const typename Element<kType>::T*>(rows[r]);
        const V weight = Simd::set1(weights[r]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const int64_t i = begin + v * Simd::kLanes;
            sums[v] = Simd::fma(weight, load_some<kType>(row + i, k - i), sums[v]);
        }
    }
    for (int v = 0; v < kVectors; ++v) {
        const int64_t i = begin + v * Simd::kLanes;
        store_some<kType>(out + i, Simd::add(sums[v], load_some<kType>(out + i, k - i)), k - i);
    }
}

template <DType kType>
void add_weighted(const void* const* rows, const float* weights, int64_t count, int64_t k, void* out_bytes) {
    constexpr int kVectors = 4;
    auto* out = static_cast<typename Element<kType>::T*>(out_bytes);
    int64_t i = 0;
    for (; i + kVectors * Simd::kLanes <= k; i += kVectors * Simd::kLanes)
        add_weighted_part<kType, kVectors>(rows, weights, count, i, k, out);
    for (; i < k; i += Simd::kLanes) add_weighted_part<kType, 1>(rows, weights, count, i, k, out);
}

float largest(const float* x, int64_t n) {
    float most = x[0];
    for (int64_t i = 1; i < n; ++i) most = x[i] > most ? x[i] : most;
    return most;
}

void softmax(const float* x, int64_t n, float* out) {
    const V most = Simd::set1(largest(x, n));
    float total = 0.0f;
    for (int64_t i = 0; i < n; i += Simd::kLanes) {
        store_some<DType::kF32>(out + i, exp(Simd::sub(load_some<DType::kF32>(x + i, n - i), most)), n - i);
        total += Simd::sum(load_some<DType::kF32>(out + i, n - i));
    }
    const V share = Simd::set1(1.0f / total);
    for (int64_t i = 0; i < n; i += Simd::kLanes)
        store_some<DType::kF32>(out + i, Simd::mul(load_some<DType::kF32>(out + i, n - i), share), n - i);
}

void sigmoid(const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += Simd::kLanes)
        store_some<DType::kF32>(out + i, sigmoid(load_some<DType::kF32>(x + i, n - i)), n - i);
}

constexpr swiftkv::ElementwiseKernels kKernels = {
    {{rms_norm<DType::kF32, NormWeight::kSameDType>, rms_norm<DType::kBf16, NormWeight::kSameDType>,
      rms_norm<DType::kF16, NormWeight::kSameDType>},
     {rms_norm<DType::kF32, NormWeight::kFloat32>, rms_norm<DType::kBf16, NormWeight::kFloat32>,
      rms_norm<DType::kF16, NormWeight::kFloat32>}},
    {{rms_norm_widen<DType::kF32, NormWeight::kSameDType>, rms_norm_widen<DType::kBf16, NormWeight::kSameDType>,
      rms_norm_widen<DType::kF16, NormWeight::kSameDType>},
     {rms_norm_widen<DType::kF32, NormWeight::kFloat32>, rms_norm_widen<DType::kBf16, NormWeight::kFloat32>,
      rms_norm_widen<DType::kF16, NormWeight::kFloat32>}},
    {widen<DType::kF32>, widen<DType::kBf16>, widen<DType::kF16>},
    {{finish<Epilogue::kStore, DType::kF32>, finish<Epilogue::kStore, DType::kBf16>,
      finish<Epilogue::kStore, DType::kF16>},
     {finish<Epilogue::kResidual, DType::kF32>, finish<Epilogue::kResidual, DType::kBf16>,
      finish<Epilogue::kResidual, DType::kF16>},
     {finish<Epilogue::kGated, DType::kF32>, finish<Epilogue::kGated, DType::kBf16>,
      finish<Epilogue::kGated, DType::kF16>}},
    {add_weighted<DType::kF32>, add_weighted<DType::kBf16>, add_weighted<DType::kF16>},
    softmax,
    sigmoid,
};

}  // namespace
