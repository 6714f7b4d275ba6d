#include "simd_avx2.h"
// The kernels are written in terms of the Simd above.
#include "gemm_kernel_impl.h"

const swiftkv::GemmKernel swiftkv::kGemmAvx2[kNumDTypes] = {
    make_kernel<FloatProduct, 6, 2>(1, false),
    make_kernel<WidenedBf16Product, 6, 2>(2, true),
    make_kernel<HalfProduct, 6, 2>(1, true),
};

const swiftkv::GemmKernel swiftkv::kCachedGemmAvx2[kNumDTypes] = {
    {},  // weights of float32 are never packed smaller
    make_cached_kernel<WidenedBf16Product, 6, 8, 16>(2),
    make_cached_kernel<HalfProduct, 6, 8, 16>(1),
};
