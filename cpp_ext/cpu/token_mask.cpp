#include "token_mask.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace swiftkv {
namespace {

constexpr int64_t kBits = 32;
constexpr float kForbidden = -std::numeric_limits<float>::infinity();

// Most words of a mask are all or nothing; of the others only the forbidden tokens are touched.
void forbid_in_row(float* logits, int64_t vocab_size, const uint32_t* words) {
    for (int64_t begin = 0; begin < vocab_size; begin += kBits) {
        const int64_t count = std::min(kBits, vocab_size - begin);
        uint32_t forbidden = ~words[begin / kBits];
        if (count < kBits) forbidden &= (uint32_t{1} << count) - 1;
        if (forbidden == ~uint32_t{0}) {
            std::fill_n(logits + begin, kBits, kForbidden);
            continue;
        }
        for (; forbidden; forbidden &= forbidden - 1) logits[begin + std::countr_zero(forbidden)] = kForbidden;
    }
}

}  // namespace

void forbid_tokens(float* logits, int64_t vocab_size, const int32_t* rows, const uint32_t* bits, int64_t num_rows) {
    const int64_t words_of_row = (vocab_size + kBits - 1) / kBits;
    for (int64_t i = 0; i < num_rows; ++i)
        forbid_in_row(logits + rows[i] * vocab_size, vocab_size, bits + i * words_of_row);
}

}  // namespace swiftkv
