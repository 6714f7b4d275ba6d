#pragma once

#include <cstdint>

namespace swiftkv {

enum class Score : int { kSoftmax = 0, kSoftmaxOfChosen = 1, kSigmoid = 2 };

// The rule by which experts are chosen; kernels/experts.py explains each field.
struct Router {
    int64_t num_experts;
    int64_t top_k;
    Score score;
    int64_t num_groups;
    int64_t top_groups;
    bool renormalise;
    float scale;
};

// Chooses for each row of logits [num_tokens, num_experts]: experts and weights [num_tokens, top_k], best first.
// select_bias [num_experts] is null or added to the scores for choosing. Of equal scores the lower expert is better.
void route(const Router& router, const float* logits, int64_t num_tokens, const float* select_bias, int32_t* experts,
           float* weights);

}  // namespace swiftkv
