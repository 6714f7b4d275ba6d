#include "four_bits.h"

#include <cstring>

namespace swiftkv {
namespace {

constexpr int64_t kChunk = FourBits::kChunk;

// Writes the codes of one column: 16 bytes of each chunk, `stride` bytes apart.
void pack_codes(const uint8_t* codes, int64_t count, int64_t stride, uint8_t* out) {
    for (int64_t chunk = 0; chunk < count / kChunk; ++chunk, codes += kChunk, out += stride)
        for (int64_t i = 0; i < kChunk / 2; ++i) out[i] = static_cast<uint8_t>(codes[i] | codes[i + kChunk / 2] << 4);
}

}  // namespace

void pack_four_bits(const FourBits& format, const FourBitRow* rows, int64_t width, int64_t num_groups, char* panel) {
    const int64_t size = format.group_size;
    for (int64_t group = 0; group < num_groups; ++group, panel += format.record_bytes(width)) {
        auto* factors = reinterpret_cast<float*>(panel);
        auto* zeros = reinterpret_cast<uint8_t*>(factors + width);
        uint8_t* codes = zeros + (format.has_zeros ? width : 0);
        std::memset(panel, 0, format.record_bytes(width));
        for (int64_t column = 0; column < width; ++column) {
            const FourBitRow& row = rows[column];
            if (row.codes == nullptr) continue;
            factors[column] = row.factors[group];
            if (format.has_zeros) zeros[column] = row.zeros[group];
            const int64_t place = column / 8 * size / kChunk * 128 + column % 4 * 32 + column % 8 / 4 * 16;
            pack_codes(row.codes + group * size, size, 128, codes + place);
        }
    }
}

}  // namespace swiftkv
