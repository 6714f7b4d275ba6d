#include "simd_avx2.h"

namespace {

// Two inputs of eight columns.
struct Inputs {
    Simd::V first;
    Simd::V second;

    static Inputs of_int8(const char* codes) {
        const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(both)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(both, both)))};
    }
    // Float16 has one more bit of exponent and a bias that is larger by 8: numbers are read 2^8 times too small.
    static Inputs of_fp8(const char* codes) {
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
        const __m256i half = _mm256_andnot_si256(_mm256_set1_epi16(1 << 14), _mm256_slli_epi16(wide, 7));
        return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
    }
    // Writes them in bfloat16, as a pair for each column.
    void store_bf16_pairs(char* out) const {
        const __m256i low = _mm256_srli_epi32(Simd::round_bf16(first), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_blend_epi16(low, Simd::round_bf16(second), 0xaa));
    }
};

}  // namespace

#include "eight_bits_impl.h"

swiftkv::UnpackCodes swiftkv::unpack_eight_bits_avx2(CodeKind kind, DType dtype, bool has_zeros) {
    return unpack_function(kind, dtype, has_zeros);
}
