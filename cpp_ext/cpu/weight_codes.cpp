#include "weight_codes.h"

#include <cstring>

#include "isa.h"

namespace swiftkv {
namespace {

constexpr int64_t kChunk = WeightCodes::kChunk;

int64_t eight_bit_lanes() {
    return active_isa() == Isa::kAvx2 ? 8 : 16;
}

void pack_four_bits(const uint8_t* codes, int64_t size, int64_t column, uint8_t* group) {
    uint8_t* out = group + column / 8 * size / kChunk * 128 + column % 4 * 32 + column % 8 / 4 * 16;
    for (int64_t chunk = 0; chunk < size / kChunk; ++chunk, codes += kChunk, out += 128)
        for (int64_t i = 0; i < kChunk / 2; ++i) out[i] = static_cast<uint8_t>(codes[i] | codes[i + kChunk / 2] << 4);
}

void pack_eight_bits(const uint8_t* codes, int64_t size, int64_t column, int64_t lanes, uint8_t* group) {
    uint8_t* out = group + column / lanes * size * lanes + column % lanes;
    for (int64_t i = 0; i < size; ++i) out[i * lanes] = codes[i];
}

auto unpack_eight_bits(Isa isa) {
    if (isa == Isa::kAvx2) return unpack_eight_bits_avx2;
    return isa == Isa::kAvx512 ? unpack_eight_bits_avx512 : unpack_eight_bits_avx512_bf16;
}

}  // namespace

void pack_codes(const WeightCodes& format, const CodedRow* rows, int64_t num_groups, const GemmKernel& kernel,
                char* panel) {
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
            const uint8_t* source = row.codes + group * size;
            if (format.kind == CodeKind::kFourBits)
                pack_four_bits(source, size, column, codes);
            else
                pack_eight_bits(source, size, column, eight_bit_lanes(), codes);
        }
    }
}

void unpack_codes(const WeightCodes& format, const char* panel, int64_t begin, int64_t end, const GemmKernel& kernel,
                  DType dtype, char* out) {
    UnpackCodes run;
    if (format.kind == CodeKind::kFourBits)  // AVX-512 machines use AVX2 here: memory takes longer
        run = unpack_four_bits_avx2(dtype, format.has_zeros);
    else
        run = unpack_eight_bits(active_isa())(format.kind, dtype, format.has_zeros);
    run(format, panel + begin * format.record_bytes(kernel.panel_width), end - begin, kernel, out);
}

}  // namespace swiftkv
