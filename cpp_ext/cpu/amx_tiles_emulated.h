#pragma once

#include <cstdint>
#include <cstring>

namespace {

struct TileState {
    uint8_t palette = 0;
    uint16_t bytes_per_row[8] = {};
    uint8_t rows[8] = {};
    char data[8][16][64] = {};
};

// The tile registers in software, as strict as the hardware: what faults in hardware traps here.
struct Tiles {
    static inline thread_local TileState state;

    static void require(bool condition) {
        if (!condition) __builtin_trap();
    }

    static void configure(const void* config) {
        const auto* bytes = static_cast<const uint8_t*>(config);
        state = TileState{};
        state.palette = bytes[0];
        require(state.palette == 1);
        for (int i = 1; i < 16; ++i) require(bytes[i] == 0);
        for (int tile = 0; tile < 8; ++tile) {
            std::memcpy(&state.bytes_per_row[tile], bytes + 16 + 2 * tile, 2);
            state.rows[tile] = bytes[48 + tile];
            require(state.rows[tile] >= 1 && state.rows[tile] <= 16);
            require(state.bytes_per_row[tile] >= 1 && state.bytes_per_row[tile] <= 64);
        }
    }
    static void release() { state = TileState{}; }

    template <int kTile>
    static void zero() {
        require(state.palette == 1);
        std::memset(state.data[kTile], 0, sizeof state.data[kTile]);
    }
    template <int kTile>
    static void load(const void* p, int64_t stride) {
        zero<kTile>();
        for (int r = 0; r < state.rows[kTile]; ++r)
            std::memcpy(state.data[kTile][r], static_cast<const char*>(p) + r * stride, state.bytes_per_row[kTile]);
    }
    template <int kTile>
    static void load_passing(const void* p, int64_t stride) {
        load<kTile>(p, stride);
    }
    template <int kTile>
    static void store(void* p, int64_t stride) {
        require(state.palette == 1);
        for (int r = 0; r < state.rows[kTile]; ++r)
            std::memcpy(static_cast<char*>(p) + r * stride, state.data[kTile][r], state.bytes_per_row[kTile]);
    }

    static float bf16(const char* p) {
        uint16_t half;
        std::memcpy(&half, p, 2);
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    template <int kSums, int kActivations, int kWeights>
    static void dot() {
        require(state.palette == 1);
        require(state.rows[kSums] == state.rows[kActivations]);
        require(state.bytes_per_row[kSums] == state.bytes_per_row[kWeights]);
        require(state.bytes_per_row[kActivations] == 4 * state.rows[kWeights]);
        const int columns = state.bytes_per_row[kSums] / 4;
        for (int r = 0; r < state.rows[kSums]; ++r) {
            float even[16] = {}, odd[16] = {}, sums[16];
            for (int k = 0; k < state.rows[kWeights]; ++k) {
                const char* x = &state.data[kActivations][r][4 * k];
                const float first = bf16(x), second = bf16(x + 2);
                for (int n = 0; n < columns; ++n) {
                    const char* w = &state.data[kWeights][k][4 * n];
                    even[n] += first * bf16(w);
                    odd[n] += second * bf16(w + 2);
                }
            }
            std::memcpy(sums, state.data[kSums][r], sizeof sums);
            for (int n = 0; n < columns; ++n) sums[n] += even[n] + odd[n];
            std::memcpy(state.data[kSums][r], sums, sizeof sums);
        }
    }
};

}  // namespace
