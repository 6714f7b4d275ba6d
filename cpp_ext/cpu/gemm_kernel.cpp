#include "gemm_kernel.h"

namespace swiftkv {

const GemmKernel& gemm_kernel(Isa isa, DType dtype) {
    const auto index = static_cast<int>(dtype);
    if (dtype == DType::kBf16 && amx_is_emulated()) return kGemmAmxEmulated;
    if (isa == Isa::kAvx2) return kGemmAvx2[index];
    if (isa == Isa::kAvx512 || dtype != DType::kBf16) return kGemmAvx512[index];
    return isa == Isa::kAmx ? kGemmAmx : kGemmAvx512Bf16;
}

const GemmKernel& cached_gemm_kernel(Isa isa, DType dtype) {
    const GemmKernel& kernel = gemm_kernel(isa, dtype);
    const auto index = static_cast<int>(dtype);
    if (&kernel == &kGemmAvx2[index]) return kCachedGemmAvx2[index];
    return &kernel == &kGemmAvx512[index] ? kCachedGemmAvx512[index] : kernel;
}

}  // namespace swiftkv
