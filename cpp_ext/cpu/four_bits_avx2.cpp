#include "simd_avx2.h"
#include "weight_codes.h"

// A group of an output has at most sixteen different weights. They are computed once, as a table of their lower bytes
// and one of their upper bytes, and a shuffle looks up sixteen of them at a time. As a table serves one column only,
// the weights of eight columns are then transposed.
namespace {

using swiftkv::DType;
using swiftkv::GemmKernel;
using swiftkv::WeightCodes;

constexpr int64_t kColumns = 8;
constexpr int64_t kChunkBytes = kColumns * WeightCodes::kChunk / 2;
constexpr int64_t kAhead = 4096;  // bytes that are fetched ahead

// The lower and the upper bytes of the weights that the codes of eight columns mean; column 4 j + i is lane j of the
// i-th vectors.
struct Tables {
    __m256i low[4];
    __m256i high[4];
};

// Returns the lower bytes of sixteen numbers rounded to bfloat16, then the upper ones.
// NaN whose last bits are set, which no program writes as a factor, may become other numbers.
__m256i bytes_of_bf16(Simd::V first, Simd::V second) {
    const __m256i both =
        _mm256_blend_epi16(_mm256_srli_epi32(Simd::round_bf16(first), 16), Simd::round_bf16(second), 0xaa);
    const __m256i by_byte = _mm256_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15,  //
                                             0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15);
    return _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(both, by_byte), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// Does the same in float16.
__m256i bytes_of_f16(Simd::V first, Simd::V second) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m256i both = _mm256_set_m128i(_mm256_cvtps_ph(second, kNearest), _mm256_cvtps_ph(first, kNearest));
    const __m256i by_byte = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,  //
                                             0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(both, by_byte), 0xd8);
}

// Returns the table of a column: the bytes of (values - zero) * factor.
template <DType kDType, bool kZeros>
__m256i table(const float* values, const int8_t* zeros, const float* factors, int column) {
    Simd::V first = Simd::load(values);
    Simd::V second = Simd::load(values + Simd::kLanes);
    if constexpr (kZeros) {
        const Simd::V zero = Simd::set1(zeros[column]);
        first = Simd::sub(first, zero);
        second = Simd::sub(second, zero);
    }
    const Simd::V factor = Simd::set1(factors[column]);
    first = Simd::mul(first, factor);
    second = Simd::mul(second, factor);
    return kDType == DType::kBf16 ? bytes_of_bf16(first, second) : bytes_of_f16(first, second);
}

template <DType kDType, bool kZeros>
Tables tables_of(const float* values, const int8_t* zeros, const float* factors) {
    Tables tables;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m256i a = table<kDType, kZeros>(values, zeros, factors, i);
        const __m256i b = table<kDType, kZeros>(values, zeros, factors, i + 4);
        tables.low[i] = _mm256_permute2x128_si256(a, b, 0x20);
        tables.high[i] = _mm256_permute2x128_si256(a, b, 0x31);
    }
    return tables;
}

// Transposes eight inputs of eight columns and writes them as pairs: [4][8 columns][2], a row of `out` for each pair.
struct Pairs {
    static constexpr int64_t kStep = 2;  // inputs of a row

    static void store(const __m256i (&columns)[4], char* out, int64_t row_bytes) {
        const __m256i a = _mm256_unpacklo_epi32(columns[0], columns[1]);
        const __m256i b = _mm256_unpacklo_epi32(columns[2], columns[3]);
        const __m256i c = _mm256_unpackhi_epi32(columns[0], columns[1]);
        const __m256i d = _mm256_unpackhi_epi32(columns[2], columns[3]);
        store_row(out, _mm256_unpacklo_epi64(a, b));
        store_row(out + row_bytes, _mm256_unpackhi_epi64(a, b));
        store_row(out + 2 * row_bytes, _mm256_unpacklo_epi64(c, d));
        store_row(out + 3 * row_bytes, _mm256_unpackhi_epi64(c, d));
    }
    static void store_row(char* out, __m256i row) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), row); }
};

// Does the same with a row for each input: [8][8 columns].
struct Singles {
    static constexpr int64_t kStep = 1;

    static void store(const __m256i (&columns)[4], char* out, int64_t row_bytes) {
        const __m256i a = _mm256_unpacklo_epi16(columns[0], columns[1]);
        const __m256i b = _mm256_unpacklo_epi16(columns[2], columns[3]);
        const __m256i c = _mm256_unpackhi_epi16(columns[0], columns[1]);
        const __m256i d = _mm256_unpackhi_epi16(columns[2], columns[3]);
        store_rows(out, row_bytes, _mm256_unpacklo_epi32(a, b));
        store_rows(out + 2 * row_bytes, row_bytes, _mm256_unpackhi_epi32(a, b));
        store_rows(out + 4 * row_bytes, row_bytes, _mm256_unpacklo_epi32(c, d));
        store_rows(out + 6 * row_bytes, row_bytes, _mm256_unpackhi_epi32(c, d));
    }
    static void store_rows(char* out, int64_t row_bytes, __m256i halves) {
        const __m256i rows = _mm256_permute4x64_epi64(halves, 0xd8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(rows));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + row_bytes), _mm256_extracti128_si256(rows, 1));
    }
};

// Writes one chunk of eight columns. Rows of `out` are steps of the kernel, row_bytes apart.
template <typename Steps>
void unpack_chunk(const Tables& tables, const char* codes, char* out, int64_t row_bytes) {
    const __m256i mask = _mm256_set1_epi8(15);
    for (int half = 0; half < 2; ++half, out += 16 / Steps::kStep * row_bytes) {
        __m256i first[4];
        __m256i second[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes) + i);
            const __m256i code = _mm256_and_si256(half == 0 ? both : _mm256_srli_epi16(both, 4), mask);
            const __m256i low = _mm256_shuffle_epi8(tables.low[i], code);
            const __m256i high = _mm256_shuffle_epi8(tables.high[i], code);
            first[i] = _mm256_unpacklo_epi8(low, high);
            second[i] = _mm256_unpackhi_epi8(low, high);
        }
        Steps::store(first, out, row_bytes);
        Steps::store(second, out + 8 / Steps::kStep * row_bytes, row_bytes);
    }
}

template <DType kDType, typename Steps, bool kZeros>
void unpack(const WeightCodes& format, const char* record, int64_t num_groups, const GemmKernel& kernel, char* out) {
    const int64_t width = kernel.panel_width;
    const int64_t unit = Steps::kStep * 2;  // bytes
    const int64_t row_bytes = kernel.block_width * unit;
    const int64_t chunks = format.group_size / WeightCodes::kChunk;
    const int64_t chunk_bytes = WeightCodes::kChunk / Steps::kStep * width * unit;  // unpacked
    for (int64_t group = 0; group < num_groups; ++group, out += chunks * chunk_bytes) {
        const auto* factors = reinterpret_cast<const float*>(record);
        const auto* zeros = reinterpret_cast<const int8_t*>(factors + width);
        record += format.record_bytes(width);
        const char* codes = record - width * format.group_size / 2;
        for (int64_t column = 0; column < width; column += kColumns) {
            const Tables tables = tables_of<kDType, kZeros>(format.values, zeros + column, factors + column);
            const int64_t block = column / kernel.block_width;
            char* to = out + (block * kernel.block_steps * kernel.block_width + column % kernel.block_width) * unit;
            for (int64_t chunk = 0; chunk < chunks; ++chunk, codes += kChunkBytes, to += chunk_bytes) {
                __builtin_prefetch(codes + kAhead, 0, 3);
                __builtin_prefetch(codes + kAhead + 64, 0, 3);
                unpack_chunk<Steps>(tables, codes, to, row_bytes);
            }
        }
    }
}

}  // namespace

swiftkv::UnpackCodes swiftkv::unpack_four_bits_avx2(DType dtype, bool has_zeros) {
    if (dtype == DType::kF16)
        return has_zeros ? unpack<DType::kF16, Singles, true> : unpack<DType::kF16, Singles, false>;
    return has_zeros ? unpack<DType::kBf16, Pairs, true> : unpack<DType::kBf16, Pairs, false>;
}
