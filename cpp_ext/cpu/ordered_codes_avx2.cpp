#include "simd_avx2.h"
#include "weight_codes.h"

namespace {

// Two inputs of eight columns.
struct Inputs {
    static constexpr float kFp8Scale = 256.0f;  // by which FP8 is read too small
    struct Values {};                           // of codes of four bits, which have an order of their own here

    Simd::V first;
    Simd::V second;

    static Values load_values(const float*) { return {}; }
    static Simd::V read_zeros(const int8_t* zeros) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros))));
    }
    template <swiftkv::CodeKind kKind>
    static Inputs read(const char* codes, const Values&) {
        const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
        if constexpr (kKind == swiftkv::CodeKind::kInt8)
            return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(both)),
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(both, both)))};
        // Float16 has one more bit of exponent than FP8, and a bias that is larger by 8.
        const __m256i half =
            _mm256_andnot_si256(_mm256_set1_epi16(1 << 14), _mm256_slli_epi16(_mm256_cvtepi8_epi16(both), 7));
        return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
    }
    // Writes them in bfloat16, as a pair for each column.
    void store_bf16_pairs(char* out) const {
        const __m256i low = _mm256_srli_epi32(Simd::round_bf16(first), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_blend_epi16(low, Simd::round_bf16(second), 0xaa));
    }
};

}  // namespace

// The functions are written in terms of the Inputs above.
#include "ordered_codes_impl.h"

swiftkv::UnpackCodes swiftkv::unpack_eight_bits_avx2(CodeKind kind, DType dtype, bool has_zeros) {
    if (kind == CodeKind::kFp8) return unpack_function<CodeKind::kFp8, false>(dtype);
    return unpack_function<CodeKind::kInt8>(dtype, has_zeros);
}
