#pragma once

#include <string_view>

namespace swiftkv {

// Instruction sets in order of preference: a later one includes all earlier ones.
enum class Isa { kAvx2, kAvx512, kAvx512Bf16, kAmx };

// Returns the last instruction set that this CPU has. Throws std::runtime_error if it lacks AVX2, FMA or F16C.
Isa supported_isa();

// Returns the fastest instruction set of this CPU, or the one that the environment variable SWIFTKV_CPU_ISA names (avx2
// | avx512 | avx512_bf16 | amx) if the CPU has it; fixed at the first call. Throws as supported_isa() does, and
// std::invalid_argument if the variable has another value.
Isa active_isa();

// Whether SWIFTKV_CPU_ISA is amx_emulated: AMX kernels run on a software model of the tile registers, for tests (those
// of attention if the CPU has AVX512-BF16). Then active_isa() serves the other kernels.
bool amx_is_emulated();

std::string_view isa_name(Isa isa);

}  // namespace swiftkv
