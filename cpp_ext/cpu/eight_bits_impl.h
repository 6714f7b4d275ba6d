// Unpacks weights of eight bits, for each instruction set. Include it after the Inputs of one. Codes lie in the order
// of the panel, so that a column's factor stays in the same lane from a load to its store.
#pragma once

#include "weight_codes.h"

namespace {

using swiftkv::CodeKind;
using swiftkv::DType;
using swiftkv::GemmKernel;
using swiftkv::WeightCodes;

constexpr int64_t kLanes = Simd::kLanes;
constexpr int64_t kChunkBytes = kLanes * WeightCodes::kChunk;
constexpr int64_t kCacheLine = 64;
constexpr int64_t kAhead = 4096;     // bytes that are fetched ahead
constexpr float kFp8Scale = 256.0f;  // see Inputs::of_fp8

// Writes one chunk of kLanes columns, of which `zero` and `factor` are. Rows of `out` are steps of the kernel.
template <CodeKind kKind, DType kDType, bool kZeros>
void unpack_chunk(const char* codes, Simd::V zero, Simd::V factor, char* out, int64_t row_bytes) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < WeightCodes::kChunk; i += 2, codes += 2 * kLanes) {
        Inputs inputs = kKind == CodeKind::kFp8 ? Inputs::of_fp8(codes) : Inputs::of_int8(codes);
        if constexpr (kZeros) inputs = {Simd::sub(inputs.first, zero), Simd::sub(inputs.second, zero)};
        inputs = {Simd::mul(inputs.first, factor), Simd::mul(inputs.second, factor)};
        if constexpr (kDType == DType::kBf16) {
            inputs.store_bf16_pairs(out + i / 2 * row_bytes);
        } else {
            Simd::store_f16(reinterpret_cast<uint16_t*>(out + i * row_bytes), inputs.first);
            Simd::store_f16(reinterpret_cast<uint16_t*>(out + (i + 1) * row_bytes), inputs.second);
        }
    }
}

template <CodeKind kKind, DType kDType, bool kZeros>
void unpack(const WeightCodes& format, const char* record, int64_t num_groups, const GemmKernel& kernel, char* out) {
    constexpr int64_t kStep = kDType == DType::kBf16 ? 2 : 1;  // inputs of a row
    constexpr int64_t kUnit = kStep * 2;                       // bytes
    const int64_t width = kernel.panel_width;
    const int64_t chunks = format.group_size / WeightCodes::kChunk;
    const int64_t chunk_bytes = WeightCodes::kChunk * width * 2;  // unpacked
    for (int64_t group = 0; group < num_groups; ++group, out += chunks * chunk_bytes) {
        const auto* factors = reinterpret_cast<const float*>(record);
        const auto* zeros = reinterpret_cast<const char*>(factors + width);
        record += format.record_bytes(width);
        const char* codes = record - width * format.group_size;
        for (int64_t column = 0; column < width; column += kLanes) {
            const Simd::V factor = Simd::load(factors + column);
            const Simd::V scaled = kKind == CodeKind::kFp8 ? Simd::mul(factor, Simd::set1(kFp8Scale)) : factor;
            Simd::V zero{};
            if constexpr (kZeros) zero = Inputs::of_int8(zeros + column).first;
            const int64_t block = column / kernel.block_width;
            char* to = out + (block * kernel.block_steps * kernel.block_width + column % kernel.block_width) * kUnit;
            for (int64_t chunk = 0; chunk < chunks; ++chunk, codes += kChunkBytes, to += chunk_bytes) {
                for (int64_t line = 0; line < kChunkBytes; line += kCacheLine)
                    __builtin_prefetch(codes + kAhead + line, 0, 3);
                unpack_chunk<kKind, kDType, kZeros>(codes, zero, scaled, to, kernel.block_width * kUnit);
            }
        }
    }
}

template <CodeKind kKind, DType kDType>
swiftkv::UnpackCodes unpack_function(bool has_zeros) {
    return has_zeros ? unpack<kKind, kDType, true> : unpack<kKind, kDType, false>;
}

swiftkv::UnpackCodes unpack_function(CodeKind kind, DType dtype, bool has_zeros) {
    const bool is_half = dtype == DType::kF16;
    if (kind == CodeKind::kFp8)
        return is_half ? unpack<CodeKind::kFp8, DType::kF16, false> : unpack<CodeKind::kFp8, DType::kBf16, false>;
    return is_half ? unpack_function<CodeKind::kInt8, DType::kF16>(has_zeros)
                   : unpack_function<CodeKind::kInt8, DType::kBf16>(has_zeros);
}

}  // namespace
