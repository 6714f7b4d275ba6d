#pragma once

// The kernels of attention.h for one instruction set. Include after a simd_*.h; all of it has internal linkage.
#include "attention_keys.h"
#include "attention_rope.h"
#include "attention_softmax.h"

namespace swiftkv {
namespace {

// Products multiplies rows by keys, and weights by values, a block of rows at a time.
template <typename Products>
struct Attention {
    using E = typename Products::Element;
    using Packed = typename E::Packed;
    using Rows = Softmax<E>;

    struct Scratch {
        typename Products::Scratch products;
        SoftmaxState total;  // of the partitions so far
        SoftmaxState part;
        float* scores[2];    // [rows of a block, kRowStride]
        Packed* weights[2];  // [rows of a block, kRowStride]

        Scratch(Arena& arena, const AttentionSpec& spec, int rows) : products(arena, spec, rows) {
            const int64_t padded = Products::padded_rows(rows), in_block = Products::block_rows(rows);
            for (SoftmaxState* state : {&total, &part}) {
                state->max = arena.take<float>(rows);
                state->sum = arena.take<float>(rows);
                state->out = arena.take<float>(padded * spec.v_head_dim);
            }
            for (int i = 0; i < 2; ++i) {
                scores[i] = arena.take<float>(in_block * kRowStride);
                weights[i] = arena.take<Packed>(in_block * kRowStride);
            }
        }
    };

    // Turns a block's scores into weights, a row each time it is called.
    struct Weighing {
        const AttentionSpec& spec;
        const AttendTask& task;
        const RowBlock& block;
        int start;  // position of the partition's first key
        float* scores;
        Packed* weights;
        SoftmaxState& part;
        int row;

        void operator()() {
            if (row >= block.end) return;
            const int64_t offset = int64_t{row - block.begin} * kRowStride;
            const int query = task.first_position + row / spec.group_size();
            const int lo = larger(spec.first_visible(query) - start, block.key_begin);
            const int hi = smaller(query + 1 - start, block.key_end);
            Rows::weigh(spec, block.key_begin, block.key_end, lo, hi, scores + offset, weights + offset, part.max[row],
                        part.sum[row]);
            ++row;
        }
        void finish() {
            while (row < block.end) (*this)();
        }
    };

    static RowBlock row_block(const AttentionSpec& spec, const AttendTask& task, int partition, int begin, int end) {
        const int start = partition * kPartitionTokens;
        const int first_query = task.first_position + begin / spec.group_size();
        const int last_query = task.first_position + (end - 1) / spec.group_size();
        const int lo = clamp_to_partition(spec.first_visible(first_query) - start);
        const int hi = larger(clamp_to_partition(last_query + 1 - start), lo);
        const int unit = Products::kKeyAlignment;
        if (lo == hi) return {begin, end, lo, lo, lo, lo};
        return {begin, end, lo, hi, lo / unit * unit, (hi + unit - 1) / unit * unit};
    }
    static int clamp_to_partition(int token) { return larger(0, smaller(token, kPartitionTokens)); }

    // Attends to the keys of one partition; the result goes to scratch.part. Blocks of rows pass through scores,
    // weights and sums; while one block's scores are weighed, products of those before and after it are under way.
    static void attend_partition(const AttentionSpec& spec, const AttendTask& task, int partition,
                                 const AttendTask* next_task, Scratch& scratch) {
        const int rows = task.num_queries * spec.group_size(), per_block = Products::block_rows(rows);
        const int num_blocks = (rows + per_block - 1) / per_block;
        const typename Products::Keys keys(spec, task, partition, next_task);
        Products::stage(spec, keys, num_blocks, scratch.products);
        const auto block_at = [&](int i) {
            return row_block(spec, task, partition, i * per_block, smaller((i + 1) * per_block, rows));
        };
        for (int i = 0; i < num_blocks + 2; ++i) {
            const bool weighs = i >= 1 && i <= num_blocks;
            const RowBlock weighed = block_at(weighs ? i - 1 : 0);
            const int parity = (i + 1) % 2;
            Weighing weighing{spec,
                              task,
                              weighed,
                              partition * kPartitionTokens,
                              scratch.scores[parity],
                              scratch.weights[parity],
                              scratch.part,
                              weighs ? weighed.begin : weighed.end};
            if (i < num_blocks)
                Products::score(spec, scratch.products, keys, block_at(i), scratch.scores[i % 2], weighing);
            if (i >= 2) {
                const RowBlock block = block_at(i - 2);
                clear_unseen(spec, block, scratch.part);
                Products::accumulate(spec, scratch.products, keys, block, scratch.weights[i % 2], scratch.part.out,
                                     weighing);
            }
            weighing.finish();
        }
    }

    // A block that sees none of the keys has no products, and its sums are zero.
    static void clear_unseen(const AttentionSpec& spec, const RowBlock& block, const SoftmaxState& part) {
        if (block.lo < block.hi) return;
        const int64_t v_dim = spec.v_head_dim;
        for (int64_t i = block.begin * v_dim; i < block.end * v_dim; ++i) part.out[i] = 0.0f;
    }

    static SoftmaxState partial_state(float* partial, int rows) {
        return {partial, partial + rows, partial + 2 * rows};
    }

    static void swap(SoftmaxState& a, SoftmaxState& b) {
        const SoftmaxState was = a;
        a = b;
        b = was;
    }

    static void attend(const AttentionSpec& spec, const AttendTask& task, const AttendTask* next_task,
                       std::byte* memory) {
        const int rows = task.num_queries * spec.group_size();
        Arena arena(memory);
        Scratch scratch(arena, spec, rows);
        [[maybe_unused]] const typename Products::Registers registers(rows);
        Products::pack_queries(spec, task, scratch.products);
        for (int p = task.partition_begin; p < task.partition_end; ++p) {
            attend_partition(spec, task, p, next_task, scratch);
            if (task.partial != nullptr)
                return Rows::copy(scratch.part, partial_state(task.partial, rows), rows, spec.v_head_dim);
            if (p == task.partition_begin)
                swap(scratch.part, scratch.total);
            else
                Rows::merge(spec, scratch.total, scratch.part, rows);
        }
        Rows::write(spec, scratch.total, rows, task.sinks, task.out);
    }

    static void merge(const AttentionSpec& spec, const MergeTask& task) {
        const int rows = task.num_queries * spec.group_size();
        const int64_t floats = int64_t{rows} * (spec.v_head_dim + 2);
        const SoftmaxState total = partial_state(task.partials, rows);
        for (int p = 1; p < task.num_partitions; ++p)
            Rows::merge(spec, total, partial_state(task.partials + p * floats, rows), rows);
        Rows::write(spec, total, rows, task.sinks, task.out);
    }

    static int64_t scratch_bytes(const AttentionSpec& spec, int num_queries) {
        Arena arena(nullptr);
        Scratch(arena, spec, num_queries * spec.group_size());
        return arena.used();
    }

    static constexpr AttentionKernels kKernels{Products::kRowsPerTask, scratch_bytes, attend, merge, RopeWrite<E>::run};
};

template <template <typename> typename Products>
const AttentionKernels& kernels_of(DType dtype) {
    switch (dtype) {
        case DType::kF32:
            return Attention<Products<Float32>>::kKernels;
        case DType::kF16:
            return Attention<Products<Float16>>::kKernels;
        default:
            return Attention<Products<BFloat16>>::kKernels;
    }
}

}  // namespace
}  // namespace swiftkv
