#include "simd_avx512.h"
// The kernels are written in terms of the Simd above.
#include "elementwise_impl.h"

const swiftkv::ElementwiseKernels swiftkv::kElementwiseAvx512Bf16 = kKernels;
