#include "experts.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "gemm_product.h"
#include "scratch.h"
#include "thread_pool.h"

namespace swiftkv {
namespace {

constexpr int64_t kTasksPerThread = 8;  // of a step with few rows, so that threads end together
constexpr int64_t kMaxScratchBytes = int64_t{256} << 20;

int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// The choices, sorted by expert. A row is one choice of one token.
struct SortedRows {
    explicit SortedRows(const Choices& choices, int64_t num_experts)
        : begin(num_experts + 1), tokens(choices.num_tokens * choices.top_k), row_of_choice(tokens.size()) {
        const auto count = static_cast<int64_t>(tokens.size());
        for (int64_t i = 0; i < count; ++i) ++begin[choices.experts[i] + 1];
        for (int64_t expert = 0; expert < num_experts; ++expert) begin[expert + 1] += begin[expert];
        std::vector<int64_t> next(begin.begin(), begin.end() - 1);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t row = next[choices.experts[i]]++;
            tokens[row] = static_cast<int32_t>(i / choices.top_k);
            row_of_choice[i] = static_cast<int32_t>(row);
        }
    }

    std::vector<int64_t> begin;   // [num_experts + 1], first row of each expert
    std::vector<int32_t> tokens;  // of each row
    std::vector<int32_t> row_of_choice;
};

// Rows of one expert against a run of its panels.
struct Task {
    int64_t expert;
    int64_t row_begin;
    int64_t row_end;
    int64_t panel_begin;
    int64_t panel_end;

    int64_t rows() const { return row_end - row_begin; }
};

// Cuts each expert's rows into tiles of at most `rows_per_tile`, and panels too if there are few tiles.
std::vector<Task> cut(const std::vector<int64_t>& begin, auto&& panels_of, int64_t rows_per_tile) {
    const auto num_experts = static_cast<int64_t>(begin.size()) - 1;
    int64_t num_tiles = 0;
    for (int64_t expert = 0; expert < num_experts; ++expert)
        num_tiles += ceil_div(begin[expert + 1] - begin[expert], rows_per_tile);
    const int64_t wanted = ceil_div(kTasksPerThread * num_threads(), std::max<int64_t>(1, num_tiles));
    std::vector<Task> tasks;
    tasks.reserve(num_tiles * wanted);
    for (int64_t expert = 0; expert < num_experts; ++expert) {
        const int64_t rows = begin[expert + 1] - begin[expert];
        const int64_t tiles = ceil_div(rows, rows_per_tile);
        const int64_t num_panels = panels_of(expert);
        const int64_t pieces = std::min(wanted, num_panels);
        for (int64_t tile = 0; tile < tiles; ++tile)
            for (int64_t piece = 0; piece < pieces; ++piece)
                tasks.push_back({expert, begin[expert] + tile * rows / tiles, begin[expert] + (tile + 1) * rows / tiles,
                                 piece * num_panels / pieces, (piece + 1) * num_panels / pieces});
    }
    return tasks;
}

// Returns the activations of `tokens`, contiguous, in this thread's working memory or in place.
Activations gather(Activations source, const int32_t* tokens, int64_t count) {
    if (count == 1) return {source.data + tokens[0] * source.stride_bytes, source.stride_bytes};
    thread_local Scratch scratch;
    char* out = reinterpret_cast<char*>(scratch.reserve(count * source.stride_bytes));
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(out + i * source.stride_bytes, source.data + tokens[i] * source.stride_bytes, source.stride_bytes);
    return {out, source.stride_bytes};
}

void run_all(const std::vector<Task>& tasks, auto&& body) {
    parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) body(tasks[i]);
    });
}

// activated[row] = gated activation(gate_up(x[token of the row]))
void run_gate_up(const PackedExperts& experts, const void* x, int64_t num_tokens, const SortedRows& rows,
                 char* activated) {
    const PackedLinear& any = experts.gate_up(0);
    const Activations source = prepare(any, x, num_tokens, std::nullopt);
    const int64_t row_bytes = experts.inner_size() * item_size(experts.dtype());
    const int64_t tile = rows_per_tile(any, source);
    const auto panels_of = [&](int64_t expert) { return experts.gate_up(expert).num_panels(); };
    run_all(cut(rows.begin, panels_of, tile), [&](const Task& task) {
        const Activations gathered = gather(source, rows.tokens.data() + task.row_begin, task.rows());
        Product(experts.gate_up(task.expert), gathered, task.rows(), Epilogue::kGated, experts.dtype(),
                activated + task.row_begin * row_bytes, experts.gated())
            .run_panels(task.panel_begin, task.panel_end);
    });
}

// outputs[row] = down(activated[row])
void run_down(const PackedExperts& experts, const char* activated, const SortedRows& rows, char* outputs) {
    const PackedLinear& any = experts.down(0);
    const Activations source = prepare(any, activated, rows.begin.back(), std::nullopt);
    const int64_t row_bytes = experts.hidden_size() * item_size(experts.dtype());
    const int64_t tile = rows_per_tile(any, source);
    const auto panels_of = [&](int64_t expert) { return experts.down(expert).num_panels(); };
    run_all(cut(rows.begin, panels_of, tile), [&](const Task& task) {
        const Activations here{source.data + task.row_begin * source.stride_bytes, source.stride_bytes};
        Product(experts.down(task.expert), here, task.rows(), Epilogue::kStore, experts.dtype(),
                outputs + task.row_begin * row_bytes)
            .run_panels(task.panel_begin, task.panel_end);
    });
}

// residual[token] += the weighted sum of its rows of `outputs`
void combine(const PackedExperts& experts, const Choices& choices, const SortedRows& rows, const char* outputs,
             char* residual) {
    const int64_t row_bytes = experts.hidden_size() * item_size(experts.dtype());
    const auto add_weighted = elementwise_kernels(active_isa()).add_weighted[static_cast<int>(experts.dtype())];
    parallel_for(
        choices.num_tokens,
        [&](int64_t begin, int64_t end, int) {
            std::vector<const void*> chosen(choices.top_k);
            for (int64_t token = begin; token < end; ++token) {
                const int64_t first = token * choices.top_k;
                for (int64_t i = 0; i < choices.top_k; ++i)
                    chosen[i] = outputs + rows.row_of_choice[first + i] * row_bytes;
                add_weighted(chosen.data(), choices.weights + first, choices.top_k, experts.hidden_size(),
                             residual + token * row_bytes);
            }
        },
        row_grain(choices.top_k * experts.hidden_size()));
}

void add_slice(const PackedExperts& experts, const char* x, const Choices& choices, int64_t* tokens_per_expert,
               char* residual) {
    const SortedRows rows(choices, experts.size());
    for (int64_t expert = 0; expert < experts.size(); ++expert)
        tokens_per_expert[expert] += rows.begin[expert + 1] - rows.begin[expert];
    thread_local Scratch activated_scratch;
    thread_local Scratch output_scratch;
    const int64_t item = item_size(experts.dtype());
    char* activated =
        reinterpret_cast<char*>(activated_scratch.reserve(rows.begin.back() * experts.inner_size() * item));
    char* outputs = reinterpret_cast<char*>(output_scratch.reserve(rows.begin.back() * experts.hidden_size() * item));
    run_gate_up(experts, x, choices.num_tokens, rows, activated);
    run_down(experts, activated, rows, outputs);
    combine(experts, choices, rows, outputs, residual);
}

}  // namespace

void PackedExperts::append(const PackedLinear& gate_up, const PackedLinear& down) {
    const bool fits = gate_up.interleaved() && gate_up.in_features() == hidden_size_ &&
                      gate_up.num_outputs() == inner_size_ && !down.interleaved() &&
                      down.in_features() == inner_size_ && down.num_outputs() == hidden_size_ &&
                      gate_up.dtype() == dtype_ && down.dtype() == dtype_;
    if (!fits) throw std::invalid_argument("an expert has another shape or dtype than its layer");
    gate_up_.push_back(gate_up);
    down_.push_back(down);
}

int64_t PackedExperts::nbytes() const {
    int64_t bytes = 0;
    for (int64_t expert = 0; expert < size(); ++expert) bytes += gate_up_[expert].nbytes() + down_[expert].nbytes();
    return bytes;
}

void add_experts(const PackedExperts& experts, const void* x, const Choices& choices, int64_t* tokens_per_expert,
                 void* residual) {
    for (int64_t i = 0; i < choices.num_tokens * choices.top_k; ++i)
        if (choices.experts[i] < 0 || choices.experts[i] >= experts.size())
            throw std::out_of_range("expert " + std::to_string(choices.experts[i]) + " is none of " +
                                    std::to_string(experts.size()));
    const int64_t row_bytes = experts.hidden_size() * item_size(experts.dtype());
    const int64_t most = std::max<int64_t>(1, kMaxScratchBytes / std::max<int64_t>(1, choices.top_k * row_bytes));
    const int64_t num_slices = ceil_div(choices.num_tokens, most);
    for (int64_t slice = 0; slice < num_slices; ++slice) {
        const int64_t begin = slice * choices.num_tokens / num_slices;
        const int64_t end = (slice + 1) * choices.num_tokens / num_slices;
        add_slice(experts, static_cast<const char*>(x) + begin * row_bytes,
                  {choices.experts + begin * choices.top_k, choices.weights + begin * choices.top_k, end - begin,
                   choices.top_k},
                  tokens_per_expert, static_cast<char*>(residual) + begin * row_bytes);
    }
}

}  // namespace swiftkv
