#include "router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "elementwise.h"
#include "gemm_product.h"
#include "thread_pool.h"

namespace swiftkv {
namespace {

constexpr float kLeast = -std::numeric_limits<float>::infinity();
constexpr int64_t kScoresOfGroup = 2;  // the score of a group is the sum of its best so many

// Chooses the `count` largest of values [n], best first; of equal ones the first. The values must not be NaN.
void choose(const float* values, int64_t n, int64_t count, int32_t* chosen) {
    int64_t size = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (size == count && !(values[i] > values[chosen[size - 1]])) continue;
        int64_t at = size < count ? size++ : count - 1;
        for (; at > 0 && values[i] > values[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
        chosen[at] = static_cast<int32_t>(i);
    }
}

// The work on one token, with memory for it.
class TokenRouter {
  public:
    TokenRouter(const Router& router, const float* select_bias)
        : router_(router),
          kernels_(elementwise_kernels(active_isa())),
          select_bias_(select_bias),
          scores_(router.num_experts),
          for_choice_(router.num_experts),
          group_scores_(router.num_groups),
          groups_(router.top_groups) {}

    void route(const float* logits, int32_t* experts, float* weights) {
        score(logits);
        choose(for_choice_.data(), router_.num_experts, router_.top_k, experts);
        for (int64_t i = 0; i < router_.top_k; ++i) weights[i] = scores_[experts[i]];
        if (router_.score == Score::kSoftmaxOfChosen) kernels_.softmax(weights, router_.top_k, weights);
        float factor = router_.scale;
        if (router_.renormalise) {
            float total = 1e-20f;
            for (int64_t i = 0; i < router_.top_k; ++i) total += weights[i];
            factor /= total;
        }
        for (int64_t i = 0; i < router_.top_k; ++i) weights[i] *= factor;
    }

  private:
    void score(const float* logits) {
        const int64_t n = router_.num_experts;
        if (router_.score == Score::kSoftmax)
            kernels_.softmax(logits, n, scores_.data());
        else if (router_.score == Score::kSigmoid)
            kernels_.sigmoid(logits, n, scores_.data());
        else
            std::copy_n(logits, n, scores_.data());
        for (int64_t i = 0; i < n; ++i) {
            const float x = scores_[i] + (select_bias_ == nullptr ? 0.0f : select_bias_[i]);
            for_choice_[i] = std::isnan(x) ? kLeast : x;
        }
        if (router_.top_groups < router_.num_groups) leave_out_groups();
    }

    void leave_out_groups() {
        const int64_t size = router_.num_experts / router_.num_groups;
        const int64_t count = std::min(kScoresOfGroup, size);
        for (int64_t group = 0; group < router_.num_groups; ++group) {
            const float* of_group = for_choice_.data() + group * size;
            int32_t best[kScoresOfGroup];
            choose(of_group, size, count, best);
            group_scores_[group] = 0.0f;
            for (int64_t i = 0; i < count; ++i) group_scores_[group] += of_group[best[i]];
        }
        choose(group_scores_.data(), router_.num_groups, router_.top_groups, groups_.data());
        for (int64_t group = 0; group < router_.num_groups; ++group)
            if (std::find(groups_.begin(), groups_.end(), group) == groups_.end())
                std::fill_n(for_choice_.data() + group * size, size, kLeast);
    }

    const Router& router_;
    const ElementwiseKernels& kernels_;
    const float* select_bias_;
    std::vector<float> scores_;
    std::vector<float> for_choice_;
    std::vector<float> group_scores_;
    std::vector<int32_t> groups_;
};

}  // namespace

void route(const Router& router, const float* logits, int64_t num_tokens, const float* select_bias, int32_t* experts,
           float* weights) {
    parallel_for(
        num_tokens,
        [&](int64_t begin, int64_t end, int) {
            TokenRouter tokens(router, select_bias);
            for (int64_t token = begin; token < end; ++token)
                tokens.route(logits + token * router.num_experts, experts + token * router.top_k,
                             weights + token * router.top_k);
        },
        row_grain(router.num_experts));
}

}  // namespace swiftkv
