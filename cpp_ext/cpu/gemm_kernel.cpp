#include "gemm_kernel.h"

namespace swiftkv {

const GemmKernel& gemm_kernel(Isa isa, DType dtype) {
    const auto index = static_cast<int>(dtype);
    if (isa == Isa::kAvx2) return kGemmAvx2[index];
    if (isa == Isa::kAvx512 || dtype != DType::kBf16) return kGemmAvx512[index];
    return kGemmAvx512Bf16;
}

}  // namespace swiftkv
