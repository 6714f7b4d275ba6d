#pragma once

#include <cstdint>

namespace swiftkv {

// Gives tokens the logit minus infinity whose bit is not set. For each of num_rows masks: the row of logits
// [.., vocab_size] that it is of, and bits [num_rows, ceil(vocab_size / 32)], the lowest for the first token of a word.
void forbid_tokens(float* logits, int64_t vocab_size, const int32_t* rows, const uint32_t* bits, int64_t num_rows);

// The same for one row, on a CPU with AVX2.
void forbid_in_row_avx2(float* logits, int64_t vocab_size, const uint32_t* words);

}  // namespace swiftkv
