#include <immintrin.h>

#include "token_mask.h"

namespace {

constexpr int kTokensOfWord = 32;
constexpr int kLanes = 8;

// Returns a bit for each forbidden token of the word that begins with token `begin`, and none past the last token.
uint32_t forbidden_tokens(const uint32_t* words, int64_t begin, int64_t vocab_size) {
    const uint32_t forbidden = ~words[begin / kTokensOfWord];
    const int64_t count = vocab_size - begin;
    return count < kTokensOfWord ? forbidden & ((uint32_t{1} << count) - 1) : forbidden;
}

}  // namespace

// Memory limits the stores, so wider ones would gain nothing.
void swiftkv::forbid_in_row_avx2(float* logits, int64_t vocab_size, const uint32_t* words) {
    const __m256 forbidden_logit = _mm256_set1_ps(-__builtin_inff());
    const __m256i bit_of_lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int64_t begin = 0; begin < vocab_size; begin += kTokensOfWord) {
        const uint32_t forbidden = forbidden_tokens(words, begin, vocab_size);
        if (forbidden == 0) continue;  // many words of a mask are all or nothing
        for (int lane = 0; lane < kTokensOfWord; lane += kLanes) {
            const __m256i bits = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(forbidden >> lane)), bit_of_lane);
            // Lanes that are left out are not touched, even if no memory is mapped there.
            _mm256_maskstore_ps(logits + begin + lane, _mm256_cmpeq_epi32(bits, bit_of_lane), forbidden_logit);
        }
    }
}
