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

// Writes the blocks of a panel from its rows, kTurn steps of k at a time, so that both stay in the first-level cache.
template <typename Unit>
void transpose(const std::vector<const char*>& rows, int64_t row_bytes, int64_t k_steps, const GemmKernel& kernel,
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
            const char* row = rows[column];  // null: zeros
            if (row == nullptr || num_bytes < static_cast<int64_t>(sizeof(units))) units.fill(0);
            if (row != nullptr) std::memcpy(units.data(), row + begin, num_bytes);
            Unit* out = panel + column / kernel.block_width * kernel.block_steps * kernel.block_width +
                        column % kernel.block_width;
            for (int64_t i = 0; i < turn; ++i) out[places[i]] = units[i];
        }
    }
}

}  // namespace

template <typename Rows>
PackedLinear::PackedLinear(const GemmKernel& kernel, const std::vector<Rows>& sources, int64_t in_features, DType dtype,
                           bool interleave)
    : kernel_(&kernel),
      dtype_(dtype),
      interleaved_(interleave),
      in_features_(in_features),
      out_features_(0),
      k_steps_(ceil_div(in_features, kernel.k_multiple) * kernel.k_multiple / kernel.k_step) {
    if (in_features < 1) throw std::invalid_argument("in_features must be at least 1");
    if (interleave && (sources.size() != 2 || sources[0].rows != sources[1].rows))
        throw std::invalid_argument("interleave needs two weights of the same size: gate and up");
    for (const auto& source : sources) {
        source_rows_.push_back(source.rows);
        out_features_ += source.rows;
    }
    if (out_features_ < 1) throw std::invalid_argument("out_features must be at least 1");
    num_panels_ = ceil_div(num_outputs(), panel_outputs());
    pack_biases(sources);
}

PackedLinear::PackedLinear(const std::vector<WeightRows>& sources, int64_t in_features, DType dtype, bool interleave)
    : PackedLinear(gemm_kernel(active_isa(), dtype), sources, in_features, dtype, interleave) {
    pack(sources, k_steps_ * step_bytes());
}

PackedLinear::PackedLinear(const std::vector<CodedRows>& sources, const WeightCodes& format, int64_t in_features,
                           DType dtype, bool interleave)
    : PackedLinear(cached_gemm_kernel(active_isa(), dtype), sources, in_features, dtype, interleave) {
    if (dtype == DType::kF32) throw std::invalid_argument("codes are for layers whose weights have 16 bits");
    const int64_t size = format.group_size;
    if (size < 1 || size > WeightCodes::kMaxGroup || size % WeightCodes::kChunk != 0 || in_features % size != 0)
        throw std::invalid_argument("groups must be of 32, 64, 96 or 128 inputs, and divide in_features");
    codes_ = format;
    pack(sources, in_features / format.group_size * format.record_bytes(kernel_->panel_width));
}

template <typename Rows>
void PackedLinear::pack_biases(const std::vector<Rows>& sources) {
    if (std::none_of(sources.begin(), sources.end(), [](const Rows& source) { return source.bias != nullptr; })) return;
    const int64_t width = kernel_->panel_width;
    bias_.resize(num_panels_ * width);
    for (int64_t i = 0; i < num_panels_ * width; ++i) {
        const auto [source, row] = place(i / width, i % width);
        if (source >= 0 && sources[source].bias != nullptr) bias_[i] = sources[source].bias[row];
    }
}

template <typename Rows>
void PackedLinear::pack(const std::vector<Rows>& sources, int64_t panel_bytes) {
    panel_bytes_ = panel_bytes;
    std::tie(arena_, panels_) = WeightArena::allocate(nbytes());
    parallel_for(num_panels_, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) pack_panel(sources, i);
    });
}

PackedLinear::Place PackedLinear::place(int64_t panel, int64_t column) const {
    const int64_t output = panel * panel_outputs() + column % panel_outputs();
    if (output >= num_outputs()) return {-1, 0};
    int64_t row = output + (column >= panel_outputs() ? num_outputs() : 0);  // up follows gate
    int64_t source = 0;
    while (row >= source_rows_[source]) row -= source_rows_[source++];
    return {source, row};
}

void PackedLinear::pack_panel(const std::vector<WeightRows>& sources, int64_t panel) {
    const int64_t row_bytes = in_features_ * item_size(dtype_);
    std::vector<const char*> rows(kernel_->panel_width);
    for (int64_t column = 0; column < kernel_->panel_width; ++column)
        if (const auto [source, row] = place(panel, column); source >= 0)
            rows[column] = static_cast<const char*>(sources[source].data) + row * row_bytes;
    char* out = panels_ + panel * panel_bytes_;
    if (kernel_->k_step * item_size(dtype_) == 4)
        transpose(rows, row_bytes, k_steps_, *kernel_, reinterpret_cast<uint32_t*>(out));
    else
        transpose(rows, row_bytes, k_steps_, *kernel_, reinterpret_cast<uint16_t*>(out));
}

void PackedLinear::pack_panel(const std::vector<CodedRows>& sources, int64_t panel) {
    const int64_t num_groups = in_features_ / codes_->group_size;
    std::vector<CodedRow> rows(kernel_->panel_width);
    for (int64_t column = 0; column < kernel_->panel_width; ++column)
        if (const auto [i, row] = place(panel, column); i >= 0) {
            const CodedRows& source = sources[i];
            rows[column] = {source.codes + row * in_features_, source.factors + row * num_groups,
                            source.zeros == nullptr ? nullptr : source.zeros + row * num_groups};
        }
    pack_codes(*codes_, rows.data(), num_groups, *kernel_, panels_ + panel * panel_bytes_);
}

int64_t PackedLinear::unpackable_steps(int64_t most) const {
    const int64_t group_steps = codes_->group_size / kernel_->k_step;
    return std::max<int64_t>(1, most / group_steps) * group_steps;
}

void PackedLinear::unpack(int64_t panel, int64_t begin, int64_t count, char* out) const {
    const int64_t group_steps = codes_->group_size / kernel_->k_step;
    unpack_codes(*codes_, panels_ + panel * panel_bytes_, begin / group_steps, (begin + count) / group_steps, *kernel_,
                 dtype_, out);
}

}  // namespace swiftkv
