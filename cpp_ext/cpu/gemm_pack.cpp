#include "gemm_pack.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "thread_pool.h"

namespace swiftkv {

// Address space for the weights of several layers, so that huge pages cover their borders too. Parts that are not
// written take no memory; all of it is given back with the last PackedLinear in it.
class WeightArena {
  public:
    explicit WeightArena(int64_t bytes) : bytes_(bytes) {
        void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) throw std::bad_alloc();
        base_ = static_cast<char*>(mapped);
        next_ = round_up(reinterpret_cast<int64_t>(base_), kHugePage) - reinterpret_cast<int64_t>(base_);
        madvise(base_, bytes, MADV_HUGEPAGE);
    }
    ~WeightArena() { munmap(base_, bytes_); }
    WeightArena(const WeightArena&) = delete;
    WeightArena& operator=(const WeightArena&) = delete;

    char* take(int64_t bytes) {  // null if there is no room
        if (next_ + bytes > bytes_) return nullptr;
        char* taken = base_ + next_;
        next_ = round_up(next_ + bytes, kAlignment);
        return taken;
    }

    // Takes bytes from the arena of the last call if it is alive and has room, else from a new one.
    static std::pair<std::shared_ptr<WeightArena>, char*> allocate(int64_t bytes) {
        static std::mutex mutex;
        static std::weak_ptr<WeightArena> last;
        std::lock_guard lock(mutex);
        std::shared_ptr<WeightArena> arena = last.lock();
        char* taken = arena ? arena->take(bytes) : nullptr;
        if (taken == nullptr) {
            arena = std::make_shared<WeightArena>(std::max(kArenaBytes, bytes + 2 * kHugePage));
            taken = arena->take(bytes);
            last = arena;
        }
        return {std::move(arena), taken};
    }

  private:
    static constexpr int64_t kHugePage = int64_t{2} << 20;
    static constexpr int64_t kArenaBytes = int64_t{256} << 20;
    static constexpr int64_t kAlignment = 4096;

    static int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

    char* base_;
    int64_t bytes_;
    int64_t next_;  // from base_
};

namespace {

int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

struct Row {
    const char* data;  // null: zeros
    float bias;
};

Row find_row(const std::vector<WeightRows>& sources, int64_t index, int64_t row_bytes) {
    for (const auto& source : sources) {
        if (index < source.rows)
            return {static_cast<const char*>(source.data) + index * row_bytes,
                    source.bias != nullptr ? source.bias[index] : 0.0f};
        index -= source.rows;
    }
    return {nullptr, 0.0f};
}

// Writes the blocks of a panel from its rows, kTurn steps of k at a time, so that both stay in the first-level cache.
template <typename Unit>
void transpose(const std::vector<Row>& rows, int64_t row_bytes, int64_t k_steps, const GemmKernel& kernel,
               Unit* panel) {
    constexpr int64_t kTurn = 16;
    const auto width = static_cast<int64_t>(rows.size());
    std::array<int64_t, kTurn> places;  // of the steps of this turn, in units from a column's first one
    std::array<Unit, kTurn> units;
    for (int64_t k0 = 0; k0 < k_steps; k0 += kTurn) {
        const int64_t turn = std::min(kTurn, k_steps - k0);
        for (int64_t i = 0; i < turn; ++i)
            places[i] = (k0 + i) / kernel.block_steps * kernel.block_steps * width +
                        (k0 + i) % kernel.block_steps * kernel.block_width;
        const int64_t begin = k0 * static_cast<int64_t>(sizeof(Unit));
        const int64_t num_bytes = std::clamp<int64_t>(row_bytes - begin, 0, sizeof(units));
        for (int64_t column = 0; column < width; ++column) {
            const char* row = rows[column].data;
            if (row == nullptr || num_bytes < static_cast<int64_t>(sizeof(units))) units.fill(0);
            if (row != nullptr) std::memcpy(units.data(), row + begin, num_bytes);
            Unit* out = panel + column / kernel.block_width * kernel.block_steps * kernel.block_width +
                        column % kernel.block_width;
            for (int64_t i = 0; i < turn; ++i) out[places[i]] = units[i];
        }
    }
}

}  // namespace

PackedLinear::PackedLinear(const std::vector<WeightRows>& sources, int64_t in_features, DType dtype, bool interleave)
    : kernel_(&gemm_kernel(active_isa(), dtype)),
      dtype_(dtype),
      interleaved_(interleave),
      in_features_(in_features),
      out_features_(0),
      k_steps_(ceil_div(in_features, kernel_->k_multiple) * kernel_->k_multiple / kernel_->k_step) {
    if (in_features < 1) throw std::invalid_argument("in_features must be at least 1");
    if (interleave && (sources.size() != 2 || sources[0].rows != sources[1].rows))
        throw std::invalid_argument("interleave needs two weights of the same size: gate and up");
    bool has_bias = false;
    for (const auto& source : sources) {
        out_features_ += source.rows;
        has_bias = has_bias || source.bias != nullptr;
    }
    if (out_features_ < 1) throw std::invalid_argument("out_features must be at least 1");
    num_panels_ = ceil_div(num_outputs(), panel_outputs());
    panel_bytes_ = k_steps_ * kernel_->panel_width * kernel_->k_step * item_size(dtype);
    if (has_bias) bias_.resize(num_panels_ * kernel_->panel_width);
    std::tie(arena_, panels_) = WeightArena::allocate(nbytes());
    parallel_for(num_panels_, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) pack_panel(sources, i);
    });
}

void PackedLinear::pack_panel(const std::vector<WeightRows>& sources, int64_t panel) {
    const int64_t row_bytes = in_features_ * item_size(dtype_);
    const int64_t width = kernel_->panel_width;
    std::vector<Row> rows(width);
    for (int64_t column = 0; column < width; ++column) {
        const int64_t output = panel * panel_outputs() + column % panel_outputs();
        const int64_t source_offset = column >= panel_outputs() ? num_outputs() : 0;  // up follows gate
        rows[column] = output < num_outputs() ? find_row(sources, source_offset + output, row_bytes) : Row{};
        if (!bias_.empty()) bias_[panel * width + column] = rows[column].bias;
    }
    char* out = panels_ + panel * panel_bytes_;
    if (kernel_->k_step * item_size(dtype_) == 4)
        transpose(rows, row_bytes, k_steps_, *kernel_, reinterpret_cast<uint32_t*>(out));
    else
        transpose(rows, row_bytes, k_steps_, *kernel_, reinterpret_cast<uint16_t*>(out));
}

}  // namespace swiftkv
