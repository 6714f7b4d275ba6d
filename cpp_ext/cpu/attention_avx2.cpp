#include "simd_avx2.h"
// The kernels are written in terms of the Simd above.
#include "attention_dot.h"
#include "attention_kernel.h"

namespace swiftkv {

const AttentionKernels& attention_kernels_avx2(DType dtype) {
    return kernels_of<DotProducts>(dtype);
}

}  // namespace swiftkv
