#include "amx_tiles_emulated.h"
// The kernel is written in terms of the Tiles above.
#include "gemm_amx_impl.h"

const swiftkv::GemmKernel swiftkv::kGemmAmxEmulated = kKernel;
