#pragma once

#include <immintrin.h>

#include <cstdint>

// 16 float32 lanes. Only for *_avx512*.cpp and *_amx.cpp; see CMakeLists.txt.
namespace {

struct Simd {
    using V = __m512;
    static constexpr int kLanes = 16;

    static V zero() { return _mm512_setzero_ps(); }
    static V set1(float x) { return _mm512_set1_ps(x); }
    static V load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, V x) { _mm512_storeu_ps(p, x); }
    static V add(V a, V b) { return _mm512_add_ps(a, b); }
    static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
    static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
    static V div(V a, V b) { return _mm512_div_ps(a, b); }
    static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
    static V add_product(V sum, V a, V b) { return _mm512_fmadd_ps(a, b, sum); }
    static V min(V a, V b) { return _mm512_min_ps(a, b); }
    static V max(V a, V b) { return _mm512_max_ps(a, b); }
    static V round(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // x - floor(x).
    static V fraction(V x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
    // Lanes [begin, end) of x, and `others` elsewhere. `begin` and `end` may lie outside of x.
    static V only(V x, int begin, int end, V others) {
        const auto below = [](int lane) { return (1u << (lane < 0 ? 0 : lane > kLanes ? kLanes : lane)) - 1; };
        return _mm512_mask_mov_ps(others, static_cast<__mmask16>(below(end) & ~below(begin)), x);
    }
    // x 2^floor(n) for n < 128.
    static V scale(V x, V n) { return _mm512_scalef_ps(x, n); }
    static float sum(V x) {
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
        const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
        const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
        return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
    }
    static float largest(V x) { return _mm512_reduce_max_ps(x); }
    static float first(V x) { return _mm512_cvtss_f32(x); }

    static V load_f16(const uint16_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static void store_f16(uint16_t* p, V x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                            _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static V load_bf16(const uint16_t* p) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    // Returns the bits of x rounded to bfloat16, in the upper halves. NaN whose last bits are set may become other
    // numbers.
    static __m512i round_bf16(V x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    }
#ifdef __AVX512BF16__
    static void store_bf16(uint16_t* p, V x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
    }
#else
    static void store_bf16(uint16_t* p, V x) {
        const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        const __m512i safe =
            _mm512_mask_or_epi32(round_bf16(x), nan, _mm512_castps_si512(x), _mm512_set1_epi32(1 << 22));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(safe, 16)));
    }
#endif
    // The first and the second of kLanes pairs of bfloat16.
    static V load_bf16_pair_first(const void* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
    }
    static V load_bf16_pair_second(const void* p) {
        return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0xffff0000)));
    }
};

}  // namespace
