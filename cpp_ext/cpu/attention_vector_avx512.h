#pragma once

#include <immintrin.h>

#include "attention_kernel.h"

// What attention_kernel.h asks for, with 512-bit vectors. For the attention_avx512*.cpp files only.
namespace swiftkv {
namespace {

struct Avx512 {
    using F = __m512;
    static constexpr int kWidth = 16;

    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static F set1(float x) { return _mm512_set1_ps(x); }
    static F zero() { return _mm512_setzero_ps(); }
    static float first(F x) { return _mm512_cvtss_f32(x); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static float reduce_max(F x) { return _mm512_reduce_max_ps(x); }
    static float reduce_sum(F x) { return _mm512_reduce_add_ps(x); }

    static F keep(F x, int lo, int hi) {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __mmask16 inside =
            _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(lo)) & _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(hi));
        return _mm512_mask_blend_ps(inside, _mm512_set1_ps(-__builtin_inff()), x);
    }

    template <int Terms>
    static F exp2(F x) {
        x = max(set1(-200.0f), x);  // -inf would make a NaN below
        const F whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const F f = sub(x, whole);
        F y = set1(kExp2<Terms>[Terms - 1]);
#pragma GCC unroll 8
        for (int i = Terms - 2; i >= 0; --i) y = fma(y, f, set1(kExp2<Terms>[i]));
        return _mm512_scalef_ps(fma(y, f, set1(1.0f)), whole);
    }
};

struct Float32 {
    using Elem = float;
    using Packed = float;
    using F = Avx512::F;
    using Fragment = F;
    using Operand = F;
    static constexpr int kPack = 1;
    static constexpr int kExpTerms = 5;

    static F load(const Elem* p) { return Avx512::load(p); }
    static F load_first(const Elem* p) { return Avx512::load(p); }
    static F broadcast(const Packed* p) { return Avx512::set1(*p); }
    static F multiply_add(F acc, F a, F b) { return Avx512::fma(a, b, acc); }
    static void pack(F x, Packed* p) { Avx512::store(p, x); }
    static F to_float(const Elem* p) { return Avx512::load(p); }
    static void from_float(F x, Elem* p) { Avx512::store(p, x); }
    static F round(F x) { return x; }
};

struct Float16 : Float32 {
    using Elem = uint16_t;

    static F load(const Elem* p) { return to_float(p); }
    static F load_first(const Elem* p) { return to_float(p); }
    static F to_float(const Elem* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static void from_float(F x, Elem* p) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
    static F round(F x) { return _mm512_cvtph_ps(narrow(x)); }

  private:
    static __m256i narrow(F x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
};

// In pairs, multiplied one after the other in float32.
struct BFloat16Emulated {
    using Elem = uint16_t;
    using Packed = float;
    using F = Avx512::F;
    struct Fragment {
        F even, odd;
    };
    using Operand = Fragment;
    static constexpr int kPack = 2;
    static constexpr int kExpTerms = 5;

    static Fragment load(const Elem* p) {
        const __m512i pairs = _mm512_loadu_si512(p);
        return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
                _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
    }
    static Fragment load_first(const Elem* p) { return {load(p).even, Avx512::zero()}; }
    static Operand broadcast(const Packed* p) { return {Avx512::set1(p[0]), Avx512::set1(p[1])}; }
    static F multiply_add(F acc, Fragment a, Operand b) {
        return Avx512::fma(a.odd, b.odd, Avx512::fma(a.even, b.even, acc));
    }
    static void pack(F x, Packed* p) { Avx512::store(p, x); }
    static F to_float(const Elem* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static void from_float(F x, Elem* p) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(x), 16)));
    }
    static F round(F x) {
        return _mm512_castsi512_ps(_mm512_and_si512(rounded(x), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    }

  private:
    static F widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
    // To the nearest, ties to even, in the upper half; a NaN stays one.
    static __m512i rounded(F x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        return _mm512_mask_mov_epi32(nearest, is_nan, _mm512_set1_epi32(0x7fc00000));
    }
};

}  // namespace
}  // namespace swiftkv
