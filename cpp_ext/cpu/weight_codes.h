#pragma once

#include <cstdint>

#include "gemm_kernel.h"

namespace swiftkv {

enum class CodeKind {
    kFourBits,  // a code is one of 16 values
    kInt8,      // a code is an integer in two's complement
    kFp8,       // a code is a float8_e4m3fn that is a number
};

// Weights as quantized checkpoints have them: weight = (value of the code - zero) * factor, computed in float32 and
// rounded to the dtype of the layer. Neighbouring inputs of an output, a group, share a factor and a zero.
struct WeightCodes {
    CodeKind kind;
    float values[16];    // what each code of four bits means
    int64_t group_size;  // a multiple of kChunk, at most kMaxGroup: larger groups are given as several
    bool has_zeros;      // not with kFp8

    static constexpr int64_t kChunk = 32;
    static constexpr int64_t kMaxGroup = 128;

    int64_t bits() const { return kind == CodeKind::kFourBits ? 4 : 8; }

    // A panel has a record for each group of its inputs: float factors[width], int8_t zeros[width] if there are any,
    // and the codes.
    int64_t record_bytes(int64_t width) const {
        return width * static_cast<int64_t>(sizeof(float)) + (has_zeros ? width : 0) + width * group_size * bits() / 8;
    }
};

// The rows of a matrix of such weights.
struct CodedRow {
    const uint8_t* codes;  // [inputs], one each; null: zeros
    const float* factors;  // [groups]
    const int8_t* zeros;   // [groups]; null if there are none
};

// Writes the panel of `kernel` whose columns are `rows`[panel_width].
void pack_codes(const WeightCodes& format, const CodedRow* rows, int64_t num_groups, const GemmKernel& kernel,
                char* panel);

// Writes groups [begin, end) of a panel to `out` as `kernel` reads weights of `dtype`, which is not float32.
void unpack_codes(const WeightCodes& format, const char* panel, int64_t begin, int64_t end, const GemmKernel& kernel,
                  DType dtype, char* out);

// The part of unpack_codes() that depends on kind and instruction set: `record` is that of the first group.
using UnpackCodes = void (*)(const WeightCodes& format, const char* record, int64_t num_groups,
                             const GemmKernel& kernel, char* out);

// For AVX2, codes of four bits lie as [width / 8][group_size / kChunk][4][2][16 bytes]. Column 4 j + i of eight is at
// [i][j], and a byte has the codes of two inputs, 16 apart, the first one in its lower half.
UnpackCodes unpack_four_bits_avx2(DType dtype, bool has_zeros);

// Otherwise codes lie in the order of the panel: [width / lanes][group_size][lanes], where a lane is one of a
// register's float32. A byte of four-bit codes has those of two inputs, the first one in its lower half.
UnpackCodes unpack_eight_bits_avx2(CodeKind kind, DType dtype, bool has_zeros);
UnpackCodes unpack_codes_avx512(CodeKind kind, DType dtype, bool has_zeros);
// Rounds tiny numbers to zero, for kernels that read them so.
UnpackCodes unpack_codes_avx512_bf16(CodeKind kind, DType dtype, bool has_zeros);

}  // namespace swiftkv
