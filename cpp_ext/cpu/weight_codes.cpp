#include "weight_codes.h"

#include <cstring>

#include "isa.h"

namespace swiftkv {
namespace {

constexpr int64_t kChunk = WeightCodes::kChunk;

// Writes the codes of a column to their places in those of a group.
using PackColumn = void (*)(const uint8_t* codes, int64_t size, int64_t column, uint8_t* group);

void pack_for_lookup(const uint8_t* codes, int64_t size, int64_t column, uint8_t* group) {
    uint8_t* out = group + column / 8 * size / kChunk * 128 + column % 4 * 32 + column % 8 / 4 * 16;
    for (int64_t chunk = 0; chunk < size / kChunk; ++chunk, codes += kChunk, out += 128)
        for (int64_t i = 0; i < kChunk / 2; ++i) out[i] = static_cast<uint8_t>(codes[i] | codes[i + kChunk / 2] << 4);
}

template <int64_t kLanes>
void pack_in_order(const uint8_t* codes, int64_t size, int64_t column, uint8_t* group) {
    uint8_t* out = group + column / kLanes * size * kLanes + column % kLanes;
    for (int64_t i = 0; i < size; ++i) out[i * kLanes] = codes[i];
}

template <int64_t kLanes>
void pack_pairs_in_order(const uint8_t* codes, int64_t size, int64_t column, uint8_t* group) {
    uint8_t* out = group + column / kLanes * size / 2 * kLanes + column % kLanes;
    for (int64_t i = 0; i < size / 2; ++i) out[i * kLanes] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
}

PackColumn pack_column(CodeKind kind, Isa isa) {
    if (isa == Isa::kAvx2) return kind == CodeKind::kFourBits ? pack_for_lookup : pack_in_order<8>;
    return kind == CodeKind::kFourBits ? pack_pairs_in_order<16> : pack_in_order<16>;
}

UnpackCodes unpack_function(const WeightCodes& format, DType dtype, Isa isa) {
    if (isa == Isa::kAvx2)
        return format.kind == CodeKind::kFourBits ? unpack_four_bits_avx2(dtype, format.has_zeros)
                                                  : unpack_eight_bits_avx2(format.kind, dtype, format.has_zeros);
    const auto function = isa == Isa::kAvx512 ? unpack_codes_avx512 : unpack_codes_avx512_bf16;
    return function(format.kind, dtype, format.has_zeros);
}

}  // namespace

void pack_codes(const WeightCodes& format, const CodedRow* rows, int64_t num_groups, const GemmKernel& kernel,
                char* panel) {
    const PackColumn pack = pack_column(format.kind, active_isa());
    const int64_t size = format.group_size;
    const int64_t width = kernel.panel_width;
    for (int64_t group = 0; group < num_groups; ++group, panel += format.record_bytes(width)) {
        auto* factors = reinterpret_cast<float*>(panel);
        auto* zeros = reinterpret_cast<int8_t*>(factors + width);
        auto* codes = reinterpret_cast<uint8_t*>(zeros + (format.has_zeros ? width : 0));
        std::memset(panel, 0, format.record_bytes(width));
        for (int64_t column = 0; column < width; ++column) {
            const CodedRow& row = rows[column];
            if (row.codes == nullptr) continue;
            factors[column] = row.factors[group];
            if (format.has_zeros) zeros[column] = row.zeros[group];
            pack(row.codes + group * size, size, column, codes);
        }
    }
}

void unpack_codes(const WeightCodes& format, const char* panel, int64_t begin, int64_t end, const GemmKernel& kernel,
                  DType dtype, char* out) {
    const UnpackCodes unpack = unpack_function(format, dtype, active_isa());
    unpack(format, panel + begin * format.record_bytes(kernel.panel_width), end - begin, kernel, out);
}

}  // namespace swiftkv
