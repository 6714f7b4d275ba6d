#include "simd_avx512.h"
// The kernels are written in terms of the Simd above.
#include "gemm_kernel_impl.h"

namespace {

struct PairDot {
    using Activation = uint32_t;  // two neighbours in k
    static constexpr int kSubSteps = 1;
    static constexpr int kVectorBytes = 64;
    static __m512i weights(const char* p, int) { return _mm512_loadu_si512(p); }
    static __m512i broadcast(const char* p) {
        int pair;
        __builtin_memcpy(&pair, p, sizeof pair);
        return _mm512_set1_epi32(pair);
    }
    static V multiply_add(__m512i a, __m512i b, V c) {
        return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
    }
};

}  // namespace

const swiftkv::GemmKernel swiftkv::kGemmAvx512Bf16 = make_kernel<PairDot, 6, 4>(2, false);
