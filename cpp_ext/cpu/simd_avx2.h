#pragma once

#include <immintrin.h>

#include <cstdint>

// 8 float32 lanes. Only for *_avx2.cpp; see CMakeLists.txt.
namespace {

struct Simd {
    using V = __m256;
    static constexpr int kLanes = 8;

    static V zero() { return _mm256_setzero_ps(); }
    static V set1(float x) { return _mm256_set1_ps(x); }
    static V load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, V x) { _mm256_storeu_ps(p, x); }
    static V add(V a, V b) { return _mm256_add_ps(a, b); }
    static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
    static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
    static V div(V a, V b) { return _mm256_div_ps(a, b); }
    static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
    // sum + a b, for sums that together with their operands take all sixteen registers. With the intrinsic, gcc 12
    // keeps some of them in memory, and a matrix product reaches only two thirds of its rate.
    static V add_product(V sum, V a, V b) {
        asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
        return sum;
    }
    static V min(V a, V b) { return _mm256_min_ps(a, b); }
    static V max(V a, V b) { return _mm256_max_ps(a, b); }
    static V round(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // x 2^n for whole n < 128; 0 from n = -127 down.
    static V scale(V x, V n) {
        const __m256i exponent = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_set1_ps(-127.0f), n));
        return _mm256_mul_ps(
            x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23)));
    }
    static float sum(V x) {
        const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
        return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
    }
    static float largest(V x) {
        const __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 pair = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
        return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
    }
    static float first(V x) { return _mm256_cvtss_f32(x); }

    static V load_f16(const uint16_t* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static void store_f16(uint16_t* p, V x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                         _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static V load_bf16(const uint16_t* p) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    // Returns the bits of x rounded to bfloat16, in the upper halves. NaN whose last bits are set may become other
    // numbers.
    static __m256i round_bf16(V x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    }
    static void store_bf16(uint16_t* p, V x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i rounded = round_bf16(x);
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(1 << 22));
        const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                         _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
    }
    // The first and the second of kLanes pairs of bfloat16.
    static V load_bf16_pair_first(const void* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)), 16));
    }
    static V load_bf16_pair_second(const void* p) {
        // Uses only the register of the result: gcc would keep zeros, or a mask, in another register that a sum needs.
        __m256 second;
        asm("vpxor %x0, %x0, %x0\n\tvpblendw $0xaa, %1, %0, %0"
            : "=x"(second)
            : "m"(*static_cast<const __m256i_u*>(p)));
        return second;
    }
};

}  // namespace
