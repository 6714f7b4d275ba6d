#include "attention_vector_avx512.h"

namespace swiftkv {

const AttentionKernels& attention_kernels_avx512(DType dtype) {
    switch (dtype) {
        case DType::kF32:
            return Attention<Avx512, Float32>::kKernels;
        case DType::kF16:
            return Attention<Avx512, Float16>::kKernels;
        default:
            return Attention<Avx512, BFloat16Emulated>::kKernels;
    }
}

}  // namespace swiftkv
