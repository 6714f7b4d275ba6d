#include "simd_avx512.h"
// The kernels are written in terms of the Simd above.
#include "attention_bf16_dot.h"
#include "attention_dot.h"
#include "attention_kernel.h"

namespace swiftkv {

const AttentionKernels& attention_kernels_avx512_bf16() {
    return Attention<DotProducts<BFloat16Dot>>::kKernels;
}

}  // namespace swiftkv
