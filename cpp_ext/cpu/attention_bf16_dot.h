#pragma once

// Include after simd_avx512.h; all of it has internal linkage.
#include "attention_element.h"

namespace swiftkv {
namespace {

// bfloat16 with vdpbf16ps, which multiplies and sums pairs. Weights are rounded to bfloat16, as in transformers.
struct BFloat16Dot : BFloat16 {
    static constexpr bool kIsWidened = false;
    static constexpr int kSubSteps = 1;
    using Packed = uint16_t;
    using Fragment = __m512i;
    using Operand = __m512i;
    static constexpr int kExpTerms = 4;

    static void store(Elem* p, V x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
    static V round(V x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(x)), 16)); }

    static Fragment fragment(const Elem* p, int) { return _mm512_loadu_si512(p); }
    static Fragment first_of_fragment(const Elem* p) {
        return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0x0000ffff));
    }
    static Operand operand(const Packed* p, int) {
        int pair;
        __builtin_memcpy(&pair, p, sizeof(pair));
        return _mm512_set1_epi32(pair);
    }
    static V multiply_add(V acc, Fragment a, Operand b) {
        return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
    }
    // Three terms are off by 8e-5; a fourth would be lost when weights are rounded.
    static constexpr float kWeightShift = 0.5f;
    static V weights_of(V x) {
        const V f = Simd::fraction(x);
        V y = Simd::fma(Simd::set1(0.05517167f), f, Simd::set1(0.15985362f));
        y = Simd::fma(y, f, Simd::set1(0.49202862f));
        return Simd::scale(Simd::fma(y, f, Simd::set1(0.70705390f)), x);
    }
    static void pack(Packed* p, V x) { store(p, x); }
    static void pack(Packed* p, V first, V second) {
        _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
    }

  private:
    static __m256i narrow(V x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }
};

}  // namespace
}  // namespace swiftkv
