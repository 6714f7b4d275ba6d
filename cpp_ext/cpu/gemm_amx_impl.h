#pragma once

#include "amx_tile_config.h"
#include "gemm_kernel.h"

// Include after a definition of Tiles, the eight tile registers; all of it has internal linkage.
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // a row of a tile
constexpr int kWeightTile = kTileRows * kTileBytes;
constexpr int kPanelWidth = 32;
constexpr int kBlockBytes = 2 * kWeightTile;  // 16 pairs of k for each half of the panel, one after the other
constexpr int kSumsBytes = kPanelWidth * 4;

thread_local int configured_rows = 0;

// Configures the tiles. Sums are in tiles 0 and 1 (the first 16 rows) and 2 and 3 (the others), activations in 4 and 5,
// weights in 6 and 7.
void configure(int rows) {
    if (rows == configured_rows) return;
    const bool two = rows > kTileRows;
    const auto upper = static_cast<uint8_t>(two ? kTileRows : rows);
    const auto lower = static_cast<uint8_t>(rows - upper);
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
        config.bytes_per_row[tile] = kTileBytes;
        config.rows[tile] = kTileRows;
    }
    for (int tile = 0; tile < 4; ++tile) config.rows[tile] = two && tile >= 2 ? lower : upper;
    config.rows[4] = upper;
    if (two) config.rows[5] = lower;
    Tiles::configure(&config);
    configured_rows = rows;
}

void release() {
    if (configured_rows != 0) Tiles::release();
    configured_rows = 0;
}

// Fetches into the second-level cache, because tiles that wait for memory hold up the others.
void fetch(const char* block, swiftkv::Prefetch ahead) {
    const int lines = ahead.lines == swiftkv::Prefetch::kAll ? kBlockBytes / kTileBytes : ahead.lines;
    const char* line = block + ahead.bytes;
    for (int i = 0; i < lines; ++i, line += kTileBytes) __builtin_prefetch(line, 0, 2);
}

template <int kTile>
void start(bool first, const char* sums) {
    if (first)
        Tiles::zero<kTile>();
    else
        Tiles::load<kTile>(sums, kSumsBytes);
}

// Interleaved rows are read once, in their order, and leave the first-level cache to the weights. Other rows must stay
// in that cache until the rest of their lines is needed.
template <int kTile, bool kInterleaved>
void load_rows(const char* a, int64_t a_stride_bytes) {
    if constexpr (kInterleaved)
        Tiles::load_passing<kTile>(a, kTileBytes);
    else
        Tiles::load<kTile>(a, a_stride_bytes);
}

template <bool kInterleaved>
void multiply_upper(const char* a, int64_t a_stride_bytes, int64_t a_step_bytes, const char* panel, int64_t k_steps,
                    bool first, char* sums, swiftkv::Prefetch ahead) {
    start<0>(first, sums);
    start<1>(first, sums + kTileBytes);
    for (int64_t k = 0; k < k_steps; k += kTileRows, a += a_step_bytes, panel += kBlockBytes) {
        fetch(panel, ahead);
        load_rows<4, kInterleaved>(a, a_stride_bytes);
        Tiles::load<6>(panel, kTileBytes);
        Tiles::dot<0, 4, 6>();
        Tiles::load<7>(panel + kWeightTile, kTileBytes);
        Tiles::dot<1, 4, 7>();
    }
    Tiles::store<0>(sums, kSumsBytes);
    Tiles::store<1>(sums + kTileBytes, kSumsBytes);
}

template <bool kInterleaved>
void multiply_both(const char* a, int64_t a_stride_bytes, int64_t a_step_bytes, const char* panel, int64_t k_steps,
                   bool first, char* sums, swiftkv::Prefetch ahead) {
    char* sums_lower = sums + kTileRows * kSumsBytes;
    start<0>(first, sums);
    start<1>(first, sums + kTileBytes);
    start<2>(first, sums_lower);
    start<3>(first, sums_lower + kTileBytes);
    for (int64_t k = 0; k < k_steps; k += kTileRows, a += a_step_bytes, panel += kBlockBytes) {
        fetch(panel, ahead);
        load_rows<4, kInterleaved>(a, a_stride_bytes);
        Tiles::load<6>(panel, kTileBytes);
        Tiles::dot<0, 4, 6>();
        Tiles::load<7>(panel + kWeightTile, kTileBytes);
        Tiles::dot<1, 4, 7>();
        load_rows<5, kInterleaved>(a + kTileRows * a_stride_bytes, a_stride_bytes);
        Tiles::dot<2, 5, 6>();
        Tiles::dot<3, 5, 7>();
    }
    Tiles::store<0>(sums, kSumsBytes);
    Tiles::store<1>(sums + kTileBytes, kSumsBytes);
    Tiles::store<2>(sums_lower, kSumsBytes);
    Tiles::store<3>(sums_lower + kTileBytes, kSumsBytes);
}

void multiply(int rows, const void* a, int64_t a_stride_bytes, const void* panel, int64_t k_steps, bool first,
              float* sums, swiftkv::Prefetch ahead) {
    configure(rows);
    const auto* x = static_cast<const char*>(a);
    const auto* weights = static_cast<const char*>(panel);
    auto* out = reinterpret_cast<char*>(sums);
    const bool two = rows > kTileRows;
    if (a_stride_bytes == kTileBytes) {
        const auto interleaved = two ? multiply_both<true> : multiply_upper<true>;
        return interleaved(x, kTileBytes, rows * kTileBytes, weights, k_steps, first, out, ahead);
    }
    const auto whole = two ? multiply_both<false> : multiply_upper<false>;
    whole(x, a_stride_bytes, kTileBytes, weights, k_steps, first, out, ahead);
}

// A piece of 16 KiB shares the first-level cache with the rows that pass it; with interleaved rows a piece has 32 KiB.
constexpr swiftkv::Blocking kBlocking = {512, 1 << 20, 16 << 10, 32 << 10, 4 << 20};
constexpr swiftkv::GemmKernel kKernel = {kPanelWidth, kTileRows, kTileRows, 2,         2 * kTileRows, 2 * kTileRows,
                                         false,       true,      multiply,  kBlocking, release};

}  // namespace
