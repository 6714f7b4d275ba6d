#include <immintrin.h>

#include "attention_kernel.h"

namespace swiftkv {
namespace {

struct Avx2 {
    using F = __m256;
    static constexpr int kWidth = 8;

    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static F set1(float x) { return _mm256_set1_ps(x); }
    static F zero() { return _mm256_setzero_ps(); }
    static float first(F x) { return _mm256_cvtss_f32(x); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }

    static float reduce_max(F x) {
        __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        m = _mm_max_ps(m, _mm_movehl_ps(m, m));
        return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
    }
    static float reduce_sum(F x) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }

    static F keep(F x, int lo, int hi) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane),
                                                   _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane));
        return _mm256_blendv_ps(set1(-__builtin_inff()), x, _mm256_castsi256_ps(inside));
    }

    template <int Terms>
    static F exp2(F x) {
        const F low = set1(-126.0f);
        const F underflow = _mm256_cmp_ps(x, low, _CMP_LT_OQ);
        x = max(low, x);
        const F whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const F f = sub(x, whole);
        F y = set1(kExp2<Terms>[Terms - 1]);
#pragma GCC unroll 8
        for (int i = Terms - 2; i >= 0; --i) y = fma(y, f, set1(kExp2<Terms>[i]));
        y = fma(y, f, set1(1.0f));
        const __m256i exponent =
            _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
        return _mm256_andnot_ps(underflow, mul(y, _mm256_castsi256_ps(exponent)));
    }
};

struct Float32 {
    using Elem = float;
    using Packed = float;
    using F = Avx2::F;
    using Fragment = F;
    using Operand = F;
    static constexpr int kPack = 1;
    static constexpr int kExpTerms = 5;

    static F load(const Elem* p) { return Avx2::load(p); }
    static F load_first(const Elem* p) { return Avx2::load(p); }
    static F broadcast(const Packed* p) { return Avx2::set1(*p); }
    static F multiply_add(F acc, F a, F b) { return Avx2::fma(a, b, acc); }
    static void pack(F x, Packed* p) { Avx2::store(p, x); }
    static F to_float(const Elem* p) { return Avx2::load(p); }
    static void from_float(F x, Elem* p) { Avx2::store(p, x); }
    static F round(F x) { return x; }
};

__m128i load_halves(const uint16_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
void store_halves(uint16_t* p, __m128i x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x);
}

struct Float16 : Float32 {
    using Elem = uint16_t;

    static F load(const Elem* p) { return to_float(p); }
    static F load_first(const Elem* p) { return to_float(p); }
    static F to_float(const Elem* p) { return _mm256_cvtph_ps(load_halves(p)); }
    static void from_float(F x, Elem* p) { store_halves(p, narrow(x)); }
    static F round(F x) { return _mm256_cvtph_ps(narrow(x)); }

  private:
    static __m128i narrow(F x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
};

// In pairs, multiplied one after the other in float32.
struct BFloat16 {
    using Elem = uint16_t;
    using Packed = float;
    using F = Avx2::F;
    struct Fragment {
        F even, odd;
    };
    using Operand = Fragment;
    static constexpr int kPack = 2;
    static constexpr int kExpTerms = 5;

    static Fragment load(const Elem* p) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), upper(pairs)};
    }
    static Fragment load_first(const Elem* p) { return {load(p).even, Avx2::zero()}; }
    static Operand broadcast(const Packed* p) { return {Avx2::set1(p[0]), Avx2::set1(p[1])}; }
    static F multiply_add(F acc, Fragment a, Operand b) {
        return Avx2::fma(a.odd, b.odd, Avx2::fma(a.even, b.even, acc));
    }
    static void pack(F x, Packed* p) { Avx2::store(p, x); }
    static F to_float(const Elem* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(p)), 16));
    }
    static void from_float(F x, Elem* p) {
        const __m256i halves = _mm256_srli_epi32(rounded(x), 16);
        store_halves(p, _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
    }
    static F round(F x) { return upper(rounded(x)); }

  private:
    static F upper(__m256i x) {
        return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
    }
    // To the nearest, ties to even, in the upper half; a NaN stays one.
    static __m256i rounded(F x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        return _mm256_blendv_epi8(nearest, _mm256_set1_epi32(0x7fc00000), is_nan);
    }
};

}  // namespace

const AttentionKernels& attention_kernels_avx2(DType dtype) {
    switch (dtype) {
        case DType::kF32:
            return Attention<Avx2, Float32>::kKernels;
        case DType::kF16:
            return Attention<Avx2, Float16>::kKernels;
        default:
            return Attention<Avx2, BFloat16>::kKernels;
    }
}

}  // namespace swiftkv
