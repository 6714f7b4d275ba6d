#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "dtype.h"
#include "gemm_kernel.h"

namespace swiftkv {

struct WeightRows {
    const void* data;  // [rows, in_features], contiguous
    int64_t rows;
    const float* bias;  // [rows], or null
};

class WeightArena;

// Weights of a linear layer as the kernels of this CPU read them: one copy serves every batch size.
class PackedLinear {
  public:
    // Packs the rows of all sources in order as outputs. With `interleave` there are two sources of equal size, gate
    // and up, and each panel holds as many rows of one as of the other, so that an epilogue sees both.
    PackedLinear(const std::vector<WeightRows>& sources, int64_t in_features, DType dtype, bool interleave);

    int64_t out_features() const { return out_features_; }
    int64_t in_features() const { return in_features_; }
    DType dtype() const { return dtype_; }
    bool interleaved() const { return interleaved_; }
    int64_t nbytes() const { return num_panels_ * panel_bytes_; }

    const GemmKernel& kernel() const { return *kernel_; }
    int64_t num_panels() const { return num_panels_; }
    int64_t panel_bytes() const { return panel_bytes_; }
    int64_t k_steps() const { return k_steps_; }
    // The number of result columns that a panel yields: half its width if interleaved.
    int64_t panel_outputs() const { return interleaved_ ? kernel_->panel_width / 2 : kernel_->panel_width; }
    int64_t num_outputs() const { return interleaved_ ? out_features_ / 2 : out_features_; }
    const char* panel(int64_t i) const { return panels_ + i * panel_bytes_; }
    const float* panel_bias(int64_t i) const {
        return bias_.empty() ? nullptr : bias_.data() + i * kernel_->panel_width;
    }

  private:
    void pack_panel(const std::vector<WeightRows>& sources, int64_t panel);

    const GemmKernel* kernel_;
    DType dtype_;
    bool interleaved_;
    int64_t in_features_;
    int64_t out_features_;
    int64_t k_steps_;
    int64_t num_panels_;
    int64_t panel_bytes_;
    std::shared_ptr<WeightArena> arena_;
    char* panels_;
    std::vector<float> bias_;  // [num_panels, panel_width] in packed order; empty if there is none
};

}  // namespace swiftkv
