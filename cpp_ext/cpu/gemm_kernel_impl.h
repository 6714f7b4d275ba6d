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

// Multiplies kVectors columns of a panel of kPanelVectors.
template <typename Product, int kRows, int kVectors, int kLines, int kPanelVectors = kVectors>
void multiply_rows(const char* a, int64_t a_stride_bytes, const char* panel, int64_t k_steps, bool first, float* sums,
                   int64_t prefetch_bytes) {
    using Activation = typename Product::Activation;
    constexpr int kWidth = kPanelVectors * Simd::kLanes;
    V acc[kRows][kVectors];
    if (first) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::zero();
    } else {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::load(sums + r * kWidth + v * Simd::kLanes);
    }
    for (int64_t k = 0; k < k_steps; ++k) {
        fetch<kVectors * Product::kVectorBytes, kLines>(panel + prefetch_bytes);
#pragma GCC unroll 2
        for (int sub = 0; sub < Product::kSubSteps; ++sub) {
            if constexpr (kRows == 1) {  // each vector is used once: no register need hold it
                const auto x = Product::broadcast(a + sub * sizeof(Activation));
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v)
                    acc[0][v] =
                        Product::multiply_add(x, Product::weights(panel + v * Product::kVectorBytes, sub), acc[0][v]);
                continue;
            }
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
        panel += kPanelVectors * Product::kVectorBytes;
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
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

// Returns how many vectors of columns are multiplied at once: as many as the sums of these rows leave registers for.
template <int kRows, int kPanelVectors, int kRegisters>
constexpr int vectors_at_once() {
    int vectors = kPanelVectors;
    while (kRows > 1 && vectors > 2 && (kRows + 1) * vectors >= kRegisters) vectors /= 2;
    return vectors;
}

// Multiplies a panel that lies in the first-level cache, where it may be passed more than once: one that is wide enough
// for a single row to have many sums at a time, because each is a chain that waits for its last product.
template <typename Product, int kMaxRows, int kPanelVectors, int kRegisters>
void multiply_cached(int rows, const void* a, int64_t a_stride_bytes, const void* panel, int64_t k_steps, bool first,
                     float* sums, Prefetch ahead) {
    constexpr int kVectors = vectors_at_once<kMaxRows, kPanelVectors, kRegisters>();
    if (rows == kMaxRows)
        for (int v = 0; v < kPanelVectors; v += kVectors)
            multiply_rows<Product, kMaxRows, kVectors, 0, kPanelVectors>(
                static_cast<const char*>(a), a_stride_bytes,
                static_cast<const char*>(panel) + v * Product::kVectorBytes, k_steps, first, sums + v * Simd::kLanes,
                0);
    else if constexpr (kMaxRows > 1)
        multiply_cached<Product, kMaxRows - 1, kPanelVectors, kRegisters>(rows, a, a_stride_bytes, panel, k_steps,
                                                                          first, sums, ahead);
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

constexpr swiftkv::Blocking kBlocking = {192, 384 << 10, 256 << 10, 256 << 10, 0};
// Panels that are unpacked are several times as wide, so activations pass them less often, and tiles have more rows.
constexpr swiftkv::Blocking kCachedBlocking = {192, 1536 << 10, 256 << 10, 256 << 10, 0};

constexpr swiftkv::GemmKernel make_kernel(int max_rows, int vectors, int k_step, bool widen_activations,
                                          decltype(swiftkv::GemmKernel::multiply) multiply,
                                          const swiftkv::Blocking& blocking) {
    const int width = vectors * Simd::kLanes;
    return {width, width, 1, k_step, k_step, max_rows, widen_activations, false, multiply, blocking, nullptr};
}

template <typename Product, int kMaxRows, int kVectors>
constexpr swiftkv::GemmKernel make_kernel(int k_step, bool widen_activations) {
    return make_kernel(kMaxRows, kVectors, k_step, widen_activations, multiply<Product, kMaxRows, kVectors>, kBlocking);
}

template <typename Product, int kMaxRows, int kVectors, int kRegisters>
constexpr swiftkv::GemmKernel make_cached_kernel(int k_step) {
    return make_kernel(kMaxRows, kVectors, k_step, true, multiply_cached<Product, kMaxRows, kVectors, kRegisters>,
                       kCachedBlocking);
}

}  // namespace
