#pragma once

#include <string_view>

namespace swiftkv {

// In order of preference: a later one can do all that an earlier one can.
enum class Isa { kAvx2, kAvx512, kAvx512Bf16, kAmx };

// The best that this CPU has, lowered by the environment variable SWIFTKV_CPU_ISA (avx2 | avx512 | avx512_bf16 | amx),
// fixed at the first call. Throws std::runtime_error if the CPU lacks AVX2, FMA or F16C, std::invalid_argument if the
// variable has another value.
Isa active_isa();

// Whether SWIFTKV_CPU_ISA is amx_emulated: AMX kernels run on a software model of the tile registers, for tests. Then
// active_isa() is what serves the rest.
bool amx_is_emulated();

std::string_view isa_name(Isa isa);

}  // namespace swiftkv
