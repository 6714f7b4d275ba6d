#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "dtype.h"
#include "gemm_kernel.h"
#include "weight_codes.h"

namespace swiftkv {

struct WeightRows {
    const void* data;  // [rows, in_features], contiguous
    int64_t rows;
    const float* bias;  // [rows], or null
};

// Rows of weights as codes; see WeightCodes.
struct CodedRows {
    const uint8_t* codes;  // [rows, in_features]
    const float* factors;  // [rows, groups]
    const int8_t* zeros;   // [rows, groups], or null
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

    // Does the same with codes, which are not unpacked in memory. Results are those of the unpacked weights, bit for
    // bit. The groups of all sources have one size, which divides in_features. The dtype is not float32.
    PackedLinear(const std::vector<CodedRows>& sources, const WeightCodes& format, int64_t in_features, DType dtype,
                 bool interleave);

    int64_t out_features() const { return out_features_; }
    int64_t in_features() const { return in_features_; }
    DType dtype() const { return dtype_; }
    bool interleaved() const { return interleaved_; }
    int64_t nbytes() const { return num_panels_ * panel_bytes_; }  // biases do not count

    const GemmKernel& kernel() const { return *kernel_; }
    int64_t num_panels() const { return num_panels_; }
    // The bytes of a panel for one step of k, as the kernel reads it.
    int64_t step_bytes() const { return kernel_->panel_width * kernel_->k_step * item_size(dtype_); }
    int64_t k_steps() const { return k_steps_; }
    // The number of result columns that a panel yields: half its width if interleaved.
    int64_t panel_outputs() const { return interleaved_ ? kernel_->panel_width / 2 : kernel_->panel_width; }
    int64_t num_outputs() const { return interleaved_ ? out_features_ / 2 : out_features_; }
    bool is_unpacked() const { return !codes_; }
    // Returns the steps of k of an unpacked panel, from `begin` on.
    const char* steps(int64_t panel, int64_t begin) const {
        return panels_ + panel * panel_bytes_ + begin * step_bytes();
    }
    // Returns the largest number of steps, at most `most` if there is one, that can be unpacked at a time.
    int64_t unpackable_steps(int64_t most) const;
    // Writes `count` steps from `begin` on, both multiples of unpackable_steps() or up to the last one, to `out`.
    void unpack(int64_t panel, int64_t begin, int64_t count, char* out) const;
    const float* panel_bias(int64_t i) const {
        return bias_.empty() ? nullptr : bias_.data() + i * kernel_->panel_width;
    }

  private:
    // The source row that becomes an output. Columns of a panel beyond the last output have none.
    struct Place {
        int64_t source;  // -1: none
        int64_t row;
    };

    template <typename Rows>
    PackedLinear(const GemmKernel& kernel, const std::vector<Rows>& sources, int64_t in_features, DType dtype,
                 bool interleave);
    template <typename Rows>
    void pack_biases(const std::vector<Rows>& sources);
    template <typename Rows>
    void pack(const std::vector<Rows>& sources, int64_t panel_bytes);
    Place place(int64_t panel, int64_t column) const;
    void pack_panel(const std::vector<WeightRows>& sources, int64_t panel);
    void pack_panel(const std::vector<CodedRows>& sources, int64_t panel);

    const GemmKernel* kernel_;
    std::optional<WeightCodes> codes_;
    std::vector<int64_t> source_rows_;
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
