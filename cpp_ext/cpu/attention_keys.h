#pragma once

// The places of a task's queries and of the keys that they see. Include after a simd_*.h; all of it has internal
// linkage.
#include "attention_element.h"

namespace swiftkv {
namespace {

// The keys per softmax. The keys and values of a partition, and those of the next, which are fetched ahead, must stay
// in the second-level cache while many rows pass. It has 1 MiB or more on processors with AVX-512, and often 512 KiB on
// others.
constexpr int kPartitionTokens = Simd::kLanes == 16 ? 512 : 256;
constexpr int kPartitionGroups = kPartitionTokens / kGroupTokens;
// The distance between rows of scores and of weights, in elements: whole cache lines, and an odd number of pairs of
// them, so that the same key of many rows lies in different sets of the first-level cache.
constexpr int kRowStride = kPartitionTokens + 32;

// Hands out aligned pieces of a thread's scratch. With nullptr as its base it only measures.
class Arena {
  public:
    explicit Arena(std::byte* base) : base_(base) {}

    template <typename T>
    T* take(int64_t count) {
        T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
        used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
        return piece;
    }
    int64_t used() const { return used_; }

  private:
    std::byte* base_;
    int64_t used_ = 0;
};

// The range of keys that some query of the task sees.
[[maybe_unused]] int visible_begin(const AttentionSpec& spec, const AttendTask& task) {
    return spec.first_visible(task.first_position);
}
[[maybe_unused]] int visible_end(const AttendTask& task) {
    return task.first_position + task.num_queries;
}

template <typename Elem>
const Elem* query_row(const AttentionSpec& spec, const AttendTask& task, int row) {
    return static_cast<const Elem*>(task.q) + row / spec.group_size() * spec.row_elements() +
           row % spec.group_size() * int64_t{spec.head_dim};
}

// The keys of one partition that some query of the task sees, [begin, end) counted from the partition's first, and the
// place of each group of them. After the last group come num_ahead groups, at most kGroupsAhead, to be fetched ahead:
// they will probably be used next, by the task's next partition or the thread's next task.
template <typename E, int kGroupsAhead>
struct PartitionKeys {
    using Elem = typename E::Elem;

    int begin, end, num_ahead;
    const Elem* k[kPartitionGroups + kGroupsAhead];
    const Elem* v[kPartitionGroups + kGroupsAhead];

    PartitionKeys(const AttentionSpec& spec, const AttendTask& task, int partition, const AttendTask* next_task) {
        const int start = partition * kPartitionTokens;
        begin = larger(visible_begin(spec, task) - start, 0);
        end = smaller(visible_end(task) - start, kPartitionTokens);
        // Only visible groups are looked up: the others are not in the table, or in blocks already freed.
        for (int group = first_group(); group < end_group(); ++group)
            find(spec, task, start + group * kGroupTokens, group);
        if (partition + 1 < task.partition_end)
            find_ahead(spec, task, start + kPartitionTokens);
        else if (next_task != nullptr)
            find_ahead(spec, *next_task,
                       larger(visible_begin(spec, *next_task), next_task->partition_begin * kPartitionTokens));
        else
            num_ahead = 0;
    }

    int first_group() const { return begin / kGroupTokens; }
    int end_group() const { return (end + kGroupTokens - 1) / kGroupTokens; }
    bool has_group(int group) const { return group >= first_group() && group < end_group(); }
    int nearest_group(int group) const { return smaller(larger(group, first_group()), end_group() - 1); }

  private:
    void find_ahead(const AttentionSpec& spec, const AttendTask& next, int next_begin) {
        const int first = next_begin / kGroupTokens * kGroupTokens, last = visible_end(next) - 1;
        num_ahead = smaller((last - first) / kGroupTokens + 1, kGroupsAhead);
        for (int ahead = 0; ahead < num_ahead; ++ahead)
            find(spec, next, first + ahead * kGroupTokens, end_group() + ahead);
    }

    void find(const AttentionSpec& spec, const AttendTask& task, int position, int group) {
        const auto* block = reinterpret_cast<const Elem*>(task.kv.layer_block(task.table[position / spec.block_size]));
        const int64_t in_block = position % spec.block_size / kGroupTokens * kGroupTokens;
        k[group] = block + spec.k_offset(task.kv_head) + in_block * E::kPack;
        v[group] = block + spec.v_offset(task.kv_head) + in_block * spec.v_head_dim;
    }
};

// Rows [begin, end) of a task, and the keys of a partition that they see. A row is query * group_size + query head.
struct RowBlock {
    int begin, end;
    int lo, hi;              // the keys that some row of the block sees, counted from the partition's first
    int key_begin, key_end;  // the same, in whole multiples of the keys that a product takes
};

// Returns a block. `start` is the position of the partition's first key, `unit` the number of keys of a product.
[[maybe_unused]] RowBlock row_block(const AttentionSpec& spec, const AttendTask& task, int start, int begin, int end,
                                    int unit) {
    const auto clamped = [](int token) { return larger(0, smaller(token, kPartitionTokens)); };
    const int first_query = task.first_position + begin / spec.group_size();
    const int last_query = task.first_position + (end - 1) / spec.group_size();
    const int lo = clamped(spec.first_visible(first_query) - start);
    const int hi = larger(clamped(last_query + 1 - start), lo);
    if (lo == hi) return {begin, end, lo, lo, lo, lo};
    return {begin, end, lo, hi, lo / unit * unit, (hi + unit - 1) / unit * unit};
}

}  // namespace
}  // namespace swiftkv
