#include "elementwise.h"

namespace swiftkv {

const ElementwiseKernels& elementwise_kernels(Isa isa) {
    return isa == Isa::kAvx2 ? kElementwiseAvx2 : kElementwiseAvx512;
}

}  // namespace swiftkv
