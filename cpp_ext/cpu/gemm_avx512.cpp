#include "simd_avx512.h"
// The kernels are written in terms of the Simd above.
#include "gemm_kernel_impl.h"

// Widening takes the same units as multiplying: the more rows share it, the better.
const swiftkv::GemmKernel swiftkv::kGemmAvx512[kNumDTypes] = {
    make_kernel<FloatProduct, 6, 4>(1, false),
    make_kernel<WidenedBf16Product, 12, 2>(2, true),
    make_kernel<HalfProduct, 12, 2>(1, true),
};

const swiftkv::GemmKernel swiftkv::kCachedGemmAvx512[kNumDTypes] = {
    {},  // weights of float32 are never packed smaller
    make_cached_kernel<WidenedBf16Product, 12, 4, 32>(2),
    make_cached_kernel<HalfProduct, 12, 4, 32>(1),
};
