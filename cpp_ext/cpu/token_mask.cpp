#include "token_mask.h"

#include "isa.h"

namespace swiftkv {

void forbid_tokens(float* logits, int64_t vocab_size, const int32_t* rows, const uint32_t* bits, int64_t num_rows) {
    active_isa();  // throws without AVX2
    const int64_t words_of_row = (vocab_size + 31) / 32;
    for (int64_t i = 0; i < num_rows; ++i)
        forbid_in_row_avx2(logits + rows[i] * vocab_size, vocab_size, bits + i * words_of_row);
}

}  // namespace swiftkv
