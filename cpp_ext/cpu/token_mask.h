#pragma once

#include <cstdint>

namespace swiftkv {

// Sets the logits of tokens whose bit is not set to minus infinity. rows[i] is the row of logits [.., vocab_size] of
// mask i; bits: [num_rows, ceil(vocab_size / 32)], the lowest bit of a word for its first token.
void forbid_tokens(float* logits, int64_t vocab_size, const int32_t* rows, const uint32_t* bits, int64_t num_rows);

// Does the same for one row, on a CPU with AVX2.
void forbid_in_row_avx2(float* logits, int64_t vocab_size, const uint32_t* words);

}  // namespace swiftkv
