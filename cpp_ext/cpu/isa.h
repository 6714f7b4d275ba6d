#pragma once

#include <string_view>

namespace swiftkv {

// Instruction sets in order of preference: a later one includes all earlier ones.
enum class Isa { kAvx2, kAvx512, kAvx512Bf16, kAmx };

// Returns the best instruction set of this CPU, lowered by the environment variable SWIFTKV_CPU_ISA (avx2 | avx512 |
// avx512_bf16 | amx), fixed at the first call. Throws std::runtime_error if the CPU lacks AVX2, FMA or F16C,
// std::invalid_argument if the variable has another value.
Isa active_isa();

// Whether SWIFTKV_CPU_ISA is amx_emulated: AMX kernels run on a software model of the tile registers, for tests (those
// of attention if the CPU has AVX512-BF16). Then active_isa() serves the other kernels.
bool amx_is_emulated();

std::string_view isa_name(Isa isa);

}  // namespace swiftkv
