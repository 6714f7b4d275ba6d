#pragma once

#include <cstdint>
#include <vector>

#include "elementwise.h"
#include "gemm_pack.h"

namespace swiftkv {

// The experts of one layer: gate and up interleaved, and down.
class PackedExperts {
  public:
    PackedExperts(int64_t hidden_size, int64_t inner_size, DType dtype, GatedActivation gated)
        : hidden_size_(hidden_size), inner_size_(inner_size), dtype_(dtype), gated_(gated) {}

    // Adds an expert: gate and up, interleaved, and down. Throws std::invalid_argument for another shape or dtype.
    void append(const PackedLinear& gate_up, const PackedLinear& down);

    int64_t size() const { return static_cast<int64_t>(gate_up_.size()); }
    int64_t hidden_size() const { return hidden_size_; }
    int64_t inner_size() const { return inner_size_; }
    DType dtype() const { return dtype_; }
    const GatedActivation& gated() const { return gated_; }
    int64_t nbytes() const;
    const PackedLinear& gate_up(int64_t expert) const { return gate_up_[expert]; }
    const PackedLinear& down(int64_t expert) const { return down_[expert]; }

  private:
    int64_t hidden_size_;
    int64_t inner_size_;
    DType dtype_;
    GatedActivation gated_;
    std::vector<PackedLinear> gate_up_;
    std::vector<PackedLinear> down_;
};

// A choice of experts for each token: both [num_tokens, top_k].
struct Choices {
    const int32_t* experts;
    const float* weights;
    int64_t num_tokens;
    int64_t top_k;
};

// residual[t] += the sum over its choices of weight * down(gated activation(gate_up(x[t]))); x and residual are
// [num_tokens, hidden_size]. A choice's products are rounded to the dtype, and summed in float32 in the order of the
// choices: a token's bits depend neither on other tokens nor on the number of threads. Counts the tokens of each expert
// in tokens_per_expert[size()]. Throws std::out_of_range if a choice is not an expert.
void add_experts(const PackedExperts& experts, const void* x, const Choices& choices, int64_t* tokens_per_expert,
                 void* residual);

}  // namespace swiftkv
