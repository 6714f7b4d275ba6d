#pragma once

#include "simd_avx512.h"

namespace {

// Two inputs of sixteen columns.
struct Inputs {
    Simd::V first;
    Simd::V second;

    static Inputs of_int8(const char* codes) {
        const auto* halves = reinterpret_cast<const __m128i*>(codes);
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves))),
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves + 1)))};
    }
    // Float16 has one more bit of exponent and a bias that is larger by 8: numbers are read 2^8 times too small.
    static Inputs of_fp8(const char* codes) {
        const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
        const __m512i half = _mm512_andnot_si512(_mm512_set1_epi16(1 << 14), _mm512_slli_epi16(wide, 7));
        return {_mm512_cvtph_ps(_mm512_castsi512_si256(half)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1))};
    }
    // Writes them in bfloat16, as a pair for each column.
    void store_bf16_pairs(char* out) const {
#ifdef __AVX512BF16__
        const auto all = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
        const __m512i column = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i order =
            _mm512_or_si512(column, _mm512_slli_epi32(_mm512_add_epi32(column, _mm512_set1_epi32(16)), 16));
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(order, all));
#else
        const __m512i low = _mm512_srli_epi32(Simd::round_bf16(first), 16);
        _mm512_storeu_si512(out, _mm512_mask_mov_epi16(low, 0xaaaaaaaa, Simd::round_bf16(second)));
#endif
    }
};

}  // namespace
