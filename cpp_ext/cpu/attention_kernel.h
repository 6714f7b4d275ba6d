#pragma once

// The kernels of attention.h for one instruction set. Include after a simd_*.h; all of it has internal linkage.
#include "attention_keys.h"
#include "attention_rope.h"
#include "attention_softmax.h"

namespace swiftkv {
namespace {

// Attention with `Products`, which attends to one partition after the other.
template <typename Products>
struct Attention {
    using E = typename Products::Element;
    using Rows = Softmax<E>;

    struct Scratch {
        typename Products::Scratch products;
        SoftmaxState total;  // of the partitions so far

        Scratch(Arena& arena, const AttentionSpec& spec, int rows)
            : products(arena, spec, rows), total(arena, Products::padded_rows(rows), spec.v_head_dim) {}
    };

    static SoftmaxState partial_state(float* partial, int rows) {
        return {partial, partial + rows, partial + 2 * rows};
    }

    static void attend(const AttentionSpec& spec, const AttendTask& task, const AttendTask* next_task,
                       std::byte* memory) {
        const int rows = task.num_queries * spec.group_size();
        Arena arena(memory);
        Scratch scratch(arena, spec, rows);
        [[maybe_unused]] const typename Products::Rounding rounding;
        [[maybe_unused]] const typename Products::Registers registers(rows);
        Products::pack_queries(spec, task, scratch.products);
        for (int p = task.partition_begin; p < task.partition_end; ++p)
            Products::add_partition(spec, task, p, next_task, scratch.products, scratch.total);
        if (task.partial == nullptr)
            Rows::write(spec, scratch.total, rows, task.sinks, task.out);
        else
            Rows::copy(scratch.total, partial_state(task.partial, rows), rows, spec.v_head_dim);
    }

    static void merge(const AttentionSpec& spec, const MergeTask& task) {
        const int rows = task.num_queries * spec.group_size();
        const int64_t floats = int64_t{rows} * (spec.v_head_dim + 2);
        [[maybe_unused]] const typename Products::Rounding rounding;
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

    static constexpr AttentionKernels kKernels{kPartitionTokens, Products::kRowsPerTask, scratch_bytes, attend, merge,
                                               RopeWrite<E>::run};
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
