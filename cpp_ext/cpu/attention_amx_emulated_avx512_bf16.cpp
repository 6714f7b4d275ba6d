#include "amx_tiles_emulated.h"
#include "simd_avx512.h"
// The kernels are written in terms of the Tiles and the Simd above.
#include "attention_amx_impl.h"

namespace swiftkv {

const AttentionKernels& attention_kernels_amx_emulated() {
    return Attention<TileProducts>::kKernels;
}

}  // namespace swiftkv
