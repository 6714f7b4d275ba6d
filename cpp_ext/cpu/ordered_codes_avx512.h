#pragma once

#include "simd_avx512.h"
#include "weight_codes.h"

namespace {

// Two inputs of sixteen columns.
struct Inputs {
    static constexpr float kFp8Scale = 256.0f;  // by which FP8 is read too small
    using Values = __m512;                      // of codes of four bits

    Simd::V first;
    Simd::V second;

    static Values load_values(const float* values) { return _mm512_loadu_ps(values); }
    static Simd::V read_zeros(const int8_t* zeros) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load(zeros))); }

    template <swiftkv::CodeKind kKind>
    static Inputs read(const char* codes, const Values& values) {
        if constexpr (kKind == swiftkv::CodeKind::kFourBits) {
            const __m512i both = _mm512_cvtepu8_epi32(load(codes));
            return {_mm512_permutexvar_ps(both, values), _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), values)};
        } else if constexpr (kKind == swiftkv::CodeKind::kInt8) {
            return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load(codes))),
                    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load(codes + Simd::kLanes)))};
        } else {  // float16 has one more bit of exponent, and a bias that is larger by 8
            const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
            const __m512i half = _mm512_andnot_si512(_mm512_set1_epi16(1 << 14), _mm512_slli_epi16(wide, 7));
            return {_mm512_cvtph_ps(_mm512_castsi512_si256(half)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1))};
        }
    }
    // Writes them in bfloat16, as a pair for each column.
    void store_bf16_pairs(char* out) const {
#ifdef __AVX512BF16__
        const auto all = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
        const __m512i column = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i order = _mm512_or_si512(column, _mm512_slli_epi32(column, 16));
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(_mm512_or_si512(order, _mm512_set1_epi32(16 << 16)), all));
#else
        const __m512i low = _mm512_srli_epi32(Simd::round_bf16(first), 16);
        _mm512_storeu_si512(out, _mm512_mask_mov_epi16(low, 0xaaaaaaaa, Simd::round_bf16(second)));
#endif
    }

  private:
    static __m128i load(const void* bytes) { return _mm_loadu_si128(static_cast<const __m128i*>(bytes)); }
};

}  // namespace
