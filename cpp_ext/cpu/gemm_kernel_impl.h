#pragma once

#include "gemm_kernel.h"

// Include after a simd_*.h; all of it has internal linkage. A Product multiplies packed weights by activations:
//   Activation        the type that is broadcast, kSubSteps of them per step of k
//   kSubSteps         multiplications per packed vector
//   kVectorBytes      packed bytes per vector of sums and step
//   weights(p, sub)   -> vector          broadcast(p) -> vector          multiply_add(a, b, c) -> V
namespace {

using V = Simd::V;
using swiftkv::Prefetch;

template <int kStepBytes, int kLines>
void fetch(const char* p) {
    if constexpr (kLines == Prefetch::kAll)
#pragma GCC unroll 4
        for (int i = 0; i < kStepBytes; i += 64) __builtin_prefetch(p + i, 0, 3);  // all are needed soon
    if constexpr (kLines > 0) __builtin_prefetch(p, 0, 2);
    if constexpr (kLines > 1) __builtin_prefetch(p + 64, 0, 2);
}

template <typename Product, int kRows, int kVectors, int kLines>
void multiply_rows(const char* a, int64_t a_stride_bytes, const char* panel, int64_t k_steps, bool first, float* sums,
                   int64_t prefetch_bytes) {
    using Activation = typename Product::Activation;
    constexpr int kWidth = kVectors * Simd::kLanes;
    V acc[kRows][kVectors];
    if (first) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::zero();
    } else {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::load(sums + r * kWidth + v * Simd::kLanes);
    }
    for (int64_t k = 0; k < k_steps; ++k) {
        fetch<kVectors * Product::kVectorBytes, kLines>(panel + prefetch_bytes);
#pragma GCC unroll 2
        for (int sub = 0; sub < Product::kSubSteps; ++sub) {
            decltype(Product::weights(panel, sub)) b[kVectors];
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) b[v] = Product::weights(panel + v * Product::kVectorBytes, sub);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                const auto x = Product::broadcast(a + r * a_stride_bytes + sub * sizeof(Activation));
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) acc[r][v] = Product::multiply_add(x, b[v], acc[r][v]);
            }
        }
        a += Product::kSubSteps * sizeof(Activation);
        panel += kVectors * Product::kVectorBytes;
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) Simd::store(sums + r * kWidth + v * Simd::kLanes, acc[r][v]);
}

template <typename Product, int kRows, int kVectors>
void multiply_rows_fetching(const char* a, int64_t a_stride_bytes, const char* panel, int64_t k_steps, bool first,
                            float* sums, Prefetch ahead) {
    switch (ahead.lines) {
        case 0:
            return multiply_rows<Product, kRows, kVectors, 0>(a, a_stride_bytes, panel, k_steps, first, sums, 0);
        case 1:
            return multiply_rows<Product, kRows, kVectors, 1>(a, a_stride_bytes, panel, k_steps, first, sums,
                                                              ahead.bytes);
        case 2:
            return multiply_rows<Product, kRows, kVectors, 2>(a, a_stride_bytes, panel, k_steps, first, sums,
                                                              ahead.bytes);
        default:
            return multiply_rows<Product, kRows, kVectors, Prefetch::kAll>(a, a_stride_bytes, panel, k_steps, first,
                                                                           sums, ahead.bytes);
    }
}

template <typename Product, int kMaxRows, int kVectors>
void multiply(int rows, const void* a, int64_t a_stride_bytes, const void* panel, int64_t k_steps, bool first,
              float* sums, Prefetch ahead) {
    if (rows == kMaxRows)
        multiply_rows_fetching<Product, kMaxRows, kVectors>(
            static_cast<const char*>(a), a_stride_bytes, static_cast<const char*>(panel), k_steps, first, sums, ahead);
    else if constexpr (kMaxRows > 1)
        multiply<Product, kMaxRows - 1, kVectors>(rows, a, a_stride_bytes, panel, k_steps, first, sums, ahead);
}

struct FloatProduct {
    using Activation = float;
    static constexpr int kSubSteps = 1;
    static constexpr int kVectorBytes = Simd::kLanes * 4;
    static V weights(const char* p, int) { return Simd::load(reinterpret_cast<const float*>(p)); }
    static V broadcast(const char* p) {
        float x;
        __builtin_memcpy(&x, p, sizeof x);
        return Simd::set1(x);
    }
    static V multiply_add(V a, V b, V c) { return Simd::add_product(c, a, b); }
};

struct HalfProduct : FloatProduct {
    static constexpr int kVectorBytes = Simd::kLanes * 2;
    static V weights(const char* p, int) { return Simd::load_f16(reinterpret_cast<const uint16_t*>(p)); }
};

struct WidenedBf16Product : FloatProduct {
    static constexpr int kSubSteps = 2;
    static V weights(const char* p, int sub) {
        return sub == 0 ? Simd::load_bf16_pair_first(p) : Simd::load_bf16_pair_second(p);
    }
};

template <typename Product, int kMaxRows, int kVectors>
constexpr swiftkv::GemmKernel make_kernel(int k_step, bool widen_activations) {
    return {kVectors * Simd::kLanes,
            kVectors * Simd::kLanes,
            1,
            k_step,
            k_step,
            kMaxRows,
            widen_activations,
            false,
            multiply<Product, kMaxRows, kVectors>,
            {192, 384 << 10, 256 << 10, 256 << 10, 0},
            nullptr};
}

}  // namespace
