#pragma once

#include <cstdint>

// The eight tile registers of the processor. Only for *_amx.cpp; see CMakeLists.txt.
namespace {

// Written in assembly because gcc 12's intrinsics do not declare that they read memory: gcc may drop stores before
// them.
struct Tiles {
    static void configure(const void* config) { asm volatile("ldtilecfg (%0)" : : "r"(config) : "memory"); }
    static void release() { asm volatile("tilerelease" : : : "memory"); }
    template <int kTile>
    static void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
    }
    template <int kTile>
    static void load(const void* p, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
    }
    // Loads data that is not read again soon, without pushing other data out of the first-level cache.
    template <int kTile>
    static void load_passing(const void* p, int64_t stride) {
        asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
    }
    template <int kTile>
    static void store(void* p, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
    }
    template <int kSums, int kActivations, int kWeights>
    static void dot() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kActivations), "i"(kWeights));
    }
};

}  // namespace
