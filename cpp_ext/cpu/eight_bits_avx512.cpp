#include "eight_bits_inputs_avx512.h"
// The kernels are written in terms of the Inputs above.
#include "eight_bits_impl.h"

swiftkv::UnpackCodes swiftkv::unpack_eight_bits_avx512(CodeKind kind, DType dtype, bool has_zeros) {
    return unpack_function(kind, dtype, has_zeros);
}
