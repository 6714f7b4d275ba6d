#include "simd_avx2.h"
// The kernels are written in terms of the Simd above.
#include "elementwise_impl.h"

const swiftkv::ElementwiseKernels swiftkv::kElementwiseAvx2 = kKernels;
