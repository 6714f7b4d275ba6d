#include "amx_tiles.h"
// The kernel is written in terms of the Tiles above.
#include "gemm_amx_impl.h"

const swiftkv::GemmKernel swiftkv::kGemmAmx = kKernel;
