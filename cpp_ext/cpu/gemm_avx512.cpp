#include "simd_avx512.h"
// The kernels are written in terms of the Simd above.
#include "gemm_kernel_impl.h"

const swiftkv::GemmKernel swiftkv::kGemmAvx512[kNumDTypes] = {
    make_kernel<FloatProduct, 6, 4>(1, false),
    make_kernel<WidenedBf16Product, 6, 4>(2, true),
    make_kernel<HalfProduct, 6, 4>(1, true),
};
