#pragma once

#include <cstdint>

#include "gemm_kernel.h"

namespace swiftkv {

// Weights of four bits, as quantized checkpoints have them: weight = (values[code] - zero) * factor, computed in
// float32 and rounded to the dtype of the layer. Neighbouring inputs of an output, a group, share a factor and a zero.
struct FourBits {
    float values[16];    // what each code means
    int64_t group_size;  // a multiple of kChunk, at most kMaxGroup: larger groups are given as several
    bool has_zeros;

    static constexpr int64_t kChunk = 32;  // inputs of an output whose codes lie together
    static constexpr int64_t kMaxGroup = 128;

    // A panel has a record for each group of its inputs: float factors[width], uint8_t zeros[width] if there are any,
    // and the codes, [width / 8][group_size / kChunk][4][2][16 bytes]. Column 4 j + i of eight is at [i][j], and a byte
    // has the codes of two inputs, 16 apart, the first one in its lower half.
    int64_t record_bytes(int64_t width) const {
        return width * static_cast<int64_t>(sizeof(float)) + (has_zeros ? width : 0) + width * group_size / 2;
    }
};

// The rows of a matrix of such weights.
struct FourBitRow {
    const uint8_t* codes;  // [inputs], one each; null: zeros
    const float* factors;  // [groups]
    const uint8_t* zeros;  // [groups]; null if there are none
};

// Writes the panel whose columns are `rows`[width].
void pack_four_bits(const FourBits& format, const FourBitRow* rows, int64_t width, int64_t num_groups, char* panel);

// Writes groups [begin, end) of a panel to `out` as `kernel` reads weights of `dtype`, which is not float32.
void unpack_four_bits(const FourBits& format, const char* panel, int64_t begin, int64_t end, const GemmKernel& kernel,
                      DType dtype, char* out);

}  // namespace swiftkv
