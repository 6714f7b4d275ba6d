#include "isa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>

namespace swiftkv {
namespace {

constexpr std::array<std::pair<std::string_view, Isa>, 4> kNames{{
    {"avx2", Isa::kAvx2},
    {"avx512", Isa::kAvx512},
    {"avx512_bf16", Isa::kAvx512Bf16},
    {"amx", Isa::kAmx},
}};

constexpr std::string_view kEmulated = "amx_emulated";

// Whether the CPU has tiles, and the operating system saves them and lets this process use them.
bool amx_is_usable() {
    if (!__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-bf16")) return false;
    constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Whether multiplying pairs of bfloat16 takes longer than widening them and multiplying twice. Intel's processors with
// tiles multiply bfloat16 fast only in these, but virtual machines may hide the tiles: then one core of an Emerald
// Rapids computes 84 GFLOP/s in pairs, and 151 widened.
bool pairs_are_slow() {
    return __builtin_cpu_is("intel") && __builtin_cpu_supports("avx512fp16");
}

Isa detect() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
        throw std::runtime_error("this CPU lacks AVX2, FMA or F16C, which swiftkv's CPU kernels need");
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return Isa::kAvx2;
    if (!__builtin_cpu_supports("avx512bf16")) return Isa::kAvx512;
    return amx_is_usable() ? Isa::kAmx : Isa::kAvx512Bf16;
}

std::string_view wanted_name() {
    const char* wanted = std::getenv("SWIFTKV_CPU_ISA");
    return wanted == nullptr ? "" : wanted;
}

Isa chosen(Isa supported) {
    const std::string_view wanted = wanted_name();
    if (wanted.empty()) return supported == Isa::kAvx512Bf16 && pairs_are_slow() ? Isa::kAvx512 : supported;
    if (wanted == kEmulated) return std::min(supported, Isa::kAvx512Bf16);
    for (const auto& [name, isa] : kNames)
        if (name == wanted) return std::min(supported, isa);
    throw std::invalid_argument("SWIFTKV_CPU_ISA=" + std::string(wanted) + ": use avx2, avx512, avx512_bf16 or amx");
}

}  // namespace

Isa supported_isa() {
    static const Isa isa = detect();
    return isa;
}

Isa active_isa() {
    static const Isa isa = chosen(supported_isa());
    return isa;
}

bool amx_is_emulated() {
    static const bool emulated = wanted_name() == kEmulated;
    return emulated;
}

std::string_view isa_name(Isa isa) {
    return kNames[static_cast<size_t>(isa)].first;
}

}  // namespace swiftkv
