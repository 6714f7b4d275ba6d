#include "elementwise.h"

namespace swiftkv {

const ElementwiseKernels& elementwise_kernels(Isa isa) {
    if (isa == Isa::kAvx2) return kElementwiseAvx2;
    return isa == Isa::kAvx512 ? kElementwiseAvx512 : kElementwiseAvx512Bf16;
}

}  // namespace swiftkv
