#include "ordered_codes_avx512.h"
// The functions are written in terms of the Inputs above.
#include "ordered_codes_impl.h"

swiftkv::UnpackCodes swiftkv::unpack_codes_avx512(CodeKind kind, DType dtype, bool has_zeros) {
    if (kind == CodeKind::kFp8) return unpack_function<CodeKind::kFp8, false>(dtype);
    return kind == CodeKind::kFourBits ? unpack_function<CodeKind::kFourBits>(dtype, has_zeros)
                                       : unpack_function<CodeKind::kInt8>(dtype, has_zeros);
}
