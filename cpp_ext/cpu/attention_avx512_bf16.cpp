#include "attention_vector_avx512.h"

namespace swiftkv {
namespace {

// Pairs multiplied and summed by vdpbf16ps; probabilities are rounded to bfloat16, as transformers does.
struct BFloat16 : BFloat16Emulated {
    using Packed = uint16_t;
    using Fragment = __m512i;
    using Operand = __m512i;
    static constexpr int kExpTerms = 4;

    static Fragment load(const Elem* p) { return _mm512_loadu_si512(p); }
    static Fragment load_first(const Elem* p) {
        return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0x0000ffff));
    }
    static Operand broadcast(const Packed* p) {
        int pair;
        __builtin_memcpy(&pair, p, sizeof(pair));
        return _mm512_set1_epi32(pair);
    }
    static F multiply_add(F acc, Fragment a, Operand b) {
        return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
    }
    static void pack(F x, Packed* p) { from_float(x, p); }
    static void from_float(F x, Elem* p) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
    }
    static F round(F x) {
        const auto narrow = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
    }
};

}  // namespace

const AttentionKernels& attention_kernels_avx512_bf16() {
    return Attention<Avx512, BFloat16>::kKernels;
}

}  // namespace swiftkv
