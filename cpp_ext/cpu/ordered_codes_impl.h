// Unpacks codes that lie in the order of the panel, so that a column's factor stays in the same lane from a load to its
// store. Include it after the Inputs of an instruction set.
#pragma once

#include "weight_codes.h"

namespace {

using swiftkv::CodeKind;
using swiftkv::DType;
using swiftkv::GemmKernel;
using swiftkv::WeightCodes;

constexpr int64_t kLanes = Simd::kLanes;
constexpr int64_t kCacheLine = 64;
constexpr int64_t kAhead = 4096;  // bytes that are fetched ahead

constexpr int64_t code_bits(CodeKind kind) {
    return kind == CodeKind::kFourBits ? 4 : 8;
}

// Writes one chunk of kLanes columns, of which `zero` and `factor` are. Rows of `out` are steps of the kernel.
template <CodeKind kKind, DType kDType, bool kZeros>
void unpack_chunk(const Inputs::Values& values, const char* codes, Simd::V zero, Simd::V factor, char* out,
                  int64_t row_bytes) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < WeightCodes::kChunk; i += 2, codes += 2 * kLanes * code_bits(kKind) / 8) {
        Inputs inputs = Inputs::read<kKind>(codes, values);
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
    constexpr int64_t kChunkBytes = kLanes * WeightCodes::kChunk * code_bits(kKind) / 8;
    constexpr int64_t kUnit = kDType == DType::kBf16 ? 4 : 2;  // bytes of a column in a row
    const Inputs::Values values = Inputs::load_values(format.values);
    const int64_t width = kernel.panel_width;
    const int64_t chunks = format.group_size / WeightCodes::kChunk;
    const int64_t chunk_bytes = WeightCodes::kChunk * width * 2;  // unpacked
    for (int64_t group = 0; group < num_groups; ++group, out += chunks * chunk_bytes) {
        const auto* factors = reinterpret_cast<const float*>(record);
        const auto* zeros = reinterpret_cast<const int8_t*>(factors + width);
        record += format.record_bytes(width);
        const char* codes = record - chunks * kChunkBytes * (width / kLanes);
        for (int64_t column = 0; column < width; column += kLanes) {
            const Simd::V scale = Simd::set1(kKind == CodeKind::kFp8 ? Inputs::kFp8Scale : 1.0f);
            const Simd::V factor = Simd::mul(Simd::load(factors + column), scale);
            const Simd::V zero = kZeros ? Inputs::read_zeros(zeros + column) : Simd::zero();
            const int64_t block = column / kernel.block_width;
            char* to = out + (block * kernel.block_steps * kernel.block_width + column % kernel.block_width) * kUnit;
            for (int64_t chunk = 0; chunk < chunks; ++chunk, codes += kChunkBytes, to += chunk_bytes) {
                for (int64_t line = 0; line < kChunkBytes; line += kCacheLine)
                    __builtin_prefetch(codes + kAhead + line, 0, 3);
                unpack_chunk<kKind, kDType, kZeros>(values, codes, zero, factor, to, kernel.block_width * kUnit);
            }
        }
    }
}

template <CodeKind kKind, bool kZeros>
swiftkv::UnpackCodes unpack_function(DType dtype) {
    return dtype == DType::kF16 ? unpack<kKind, DType::kF16, kZeros> : unpack<kKind, DType::kBf16, kZeros>;
}

template <CodeKind kKind>
swiftkv::UnpackCodes unpack_function(DType dtype, bool has_zeros) {
    return has_zeros ? unpack_function<kKind, true>(dtype) : unpack_function<kKind, false>(dtype);
}

}  // namespace
