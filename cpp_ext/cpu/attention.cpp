#include "attention.h"

#include <algorithm>
#include <vector>

#include "scratch.h"
#include "thread_pool.h"

namespace swiftkv {
namespace {

// A thread's share is cut into at least this many tasks, if there are as many partitions.
constexpr int kTasksPerThread = 8;
// Tasks are not made smaller than this for threads to end together: keys are read once for all rows of a task.
constexpr int kFewestRowsPerTask = 48;

std::byte* thread_scratch(int64_t bytes) {
    thread_local Scratch scratch;
    return scratch.reserve(bytes);
}

const AttentionKernels& kernels(DType dtype) {
    const Isa isa = active_isa();
    if (isa == Isa::kAvx2) return attention_kernels_avx2(dtype);
    if (isa == Isa::kAvx512 || dtype != DType::kBf16) return attention_kernels_avx512(dtype);
    if (amx_is_emulated()) return attention_kernels_amx_emulated();
    return isa == Isa::kAmx ? attention_kernels_amx() : attention_kernels_avx512_bf16();
}

KvLayer kv_layer(const AttentionSpec& spec, DType dtype, const void* pool, int layer) {
    auto* base = static_cast<std::byte*>(const_cast<void*>(pool));
    return {base, spec.layer_block_elements() * item_size(dtype), layer};
}

// Consecutive queries of one sequence, for every KV head.
struct QueryTile {
    int seq;
    int first_row;  // of qkv
    int first_position;
    int num_queries;
    int partition_begin, partition_end;
    int64_t cost;
    int64_t partial_offset = -1;  // in floats, -1 if not cut into partitions

    int num_partitions() const { return partition_end - partition_begin; }
};

std::vector<QueryTile> query_tiles(const AttentionSpec& spec, const AttentionBatch& batch, int partition_tokens,
                                   int max_queries) {
    std::vector<QueryTile> tiles;
    for (int s = 0; s < batch.num_seqs; ++s) {
        const int begin = batch.query_starts[s], end = batch.query_starts[s + 1];
        const int offset = batch.context_lens[s] - end;  // position minus row
        for (int row = begin; row < end; row += max_queries) {
            const int num_queries = std::min(max_queries, end - row);
            const int first = spec.first_visible(row + offset), last = row + offset + num_queries - 1;
            // Reading a key costs about as much as four rows' arithmetic on it.
            const int64_t cost = int64_t{last - first + 1} * (num_queries * spec.group_size() + 4);
            tiles.push_back(
                {s, row, row + offset, num_queries, first / partition_tokens, last / partition_tokens + 1, cost});
        }
    }
    // Long tiles come first, so that threads end together.
    std::stable_sort(tiles.begin(), tiles.end(), [](const auto& a, const auto& b) { return a.cost > b.cost; });
    return tiles;
}

int64_t total_cost(const std::vector<QueryTile>& tiles, int num_kv_heads) {
    int64_t cost = 0;
    for (const auto& tile : tiles) cost += tile.cost * num_kv_heads;
    return cost;
}

// A tile with a higher cost is a long one: threads may have to wait for it.
int64_t long_cost(const std::vector<QueryTile>& tiles, int num_kv_heads) {
    return total_cost(tiles, num_kv_heads) / (int64_t{kTasksPerThread} * num_threads());
}

// Whether threads that always take the longest task left end together, within a tenth, judged by the long tiles.
// `tiles` are sorted, the longest first; each is one task per KV head.
bool divides_evenly(const std::vector<QueryTile>& tiles, int num_kv_heads) {
    const int64_t long_above = long_cost(tiles, num_kv_heads), total = total_cost(tiles, num_kv_heads);
    std::vector<int64_t> busy(num_threads());
    for (const auto& tile : tiles) {
        if (tile.cost <= long_above) break;
        for (int head = 0; head < num_kv_heads; ++head) *std::min_element(busy.begin(), busy.end()) += tile.cost;
    }
    return *std::max_element(busy.begin(), busy.end()) * num_threads() <= total + total / 10;
}

// Returns tiles as large as the kernel takes, so that keys are read seldom, or smaller ones if threads would wait.
std::vector<QueryTile> even_tiles(const AttentionSpec& spec, const AttentionBatch& batch,
                                  const AttentionKernels& kernel) {
    int max_queries = std::max(1, kernel.rows_per_task / spec.group_size());
    std::vector<QueryTile> tiles = query_tiles(spec, batch, kernel.partition_tokens, max_queries);
    const auto can_be_smaller = [&] {
        return max_queries / 2 * spec.group_size() >= kFewestRowsPerTask &&
               std::any_of(tiles.begin(), tiles.end(), [&](auto& tile) { return tile.num_queries > max_queries / 2; });
    };
    while (can_be_smaller() && !divides_evenly(tiles, spec.num_kv_heads)) {
        max_queries /= 2;
        tiles = query_tiles(spec, batch, kernel.partition_tokens, max_queries);
    }
    return tiles;
}

// Decides which tiles are cut, and returns the number of floats that their partial results need. Cutting costs a pass
// over the partial results, a sixth of the time of 64 queries at 2,048 keys, so only tiles that would leave threads
// waiting are cut.
int64_t place_partials(const AttentionSpec& spec, std::vector<QueryTile>& tiles) {
    if (divides_evenly(tiles, spec.num_kv_heads)) return 0;
    const int64_t cut_above = long_cost(tiles, spec.num_kv_heads);
    int64_t floats = 0;
    for (auto& tile : tiles) {
        if (tile.cost <= cut_above || tile.num_partitions() == 1) continue;
        tile.partial_offset = floats;
        floats += int64_t{tile.num_partitions()} * tile.num_queries * spec.num_heads * (spec.v_head_dim + 2);
    }
    return floats;
}

struct Slice {
    int tile;
    int partition_begin, partition_end;
};

std::vector<Slice> slices(const std::vector<QueryTile>& tiles) {
    std::vector<Slice> result;
    for (int t = 0; t < static_cast<int>(tiles.size()); ++t) {
        const auto& tile = tiles[t];
        if (tile.partial_offset < 0) {
            result.push_back({t, tile.partition_begin, tile.partition_end});
            continue;
        }
        for (int p = tile.partition_begin; p < tile.partition_end; ++p) result.push_back({t, p, p + 1});
    }
    return result;
}

}  // namespace

void attention(const AttentionSpec& spec, const AttentionBatch& batch, DType dtype, const void* qkv, const void* pool,
               int layer, const float* sinks, void* out) {
    const AttentionKernels& kernel = kernels(dtype);
    const int64_t q_bytes = int64_t{spec.group_size()} * spec.head_dim * item_size(dtype);  // of a KV head
    const int64_t out_bytes = int64_t{spec.group_size()} * spec.v_head_dim * item_size(dtype);
    const int64_t row_bytes = spec.row_elements() * item_size(dtype);
    const int num_kv_heads = spec.num_kv_heads;

    std::vector<QueryTile> tiles = even_tiles(spec, batch, kernel);
    thread_local Scratch partial_memory;
    auto* partials = reinterpret_cast<float*>(partial_memory.reserve(place_partials(spec, tiles) * sizeof(float)));
    const auto partials_of = [&](const QueryTile& tile, int head) {
        const int64_t rows = int64_t{tile.num_queries} * spec.group_size();
        return partials + tile.partial_offset + head * tile.num_partitions() * rows * (spec.v_head_dim + 2);
    };
    const auto out_of = [&](const QueryTile& tile, int head) {
        return static_cast<std::byte*>(out) + (tile.first_row * num_kv_heads + head) * out_bytes;
    };

    const auto sinks_of = [&](int head) { return sinks == nullptr ? nullptr : sinks + head * spec.group_size(); };

    const std::vector<Slice> work = slices(tiles);
    const KvLayer kv = kv_layer(spec, dtype, pool, layer);
    const auto task_at = [&](int64_t i) {
        const Slice& slice = work[i / num_kv_heads];
        const int head = static_cast<int>(i % num_kv_heads);
        const QueryTile& tile = tiles[slice.tile];
        const int64_t partial_floats = int64_t{tile.num_queries} * spec.group_size() * (spec.v_head_dim + 2);
        return AttendTask{
            .kv = kv,
            .table = batch.block_table + batch.table_starts[tile.seq],
            .kv_head = head,
            .first_position = tile.first_position,
            .num_queries = tile.num_queries,
            .partition_begin = slice.partition_begin,
            .partition_end = slice.partition_end,
            .q = static_cast<const std::byte*>(qkv) + tile.first_row * row_bytes + head * q_bytes,
            .sinks = sinks_of(head),
            .out = out_of(tile, head),
            .partial = tile.partial_offset < 0
                           ? nullptr
                           : partials_of(tile, head) + (slice.partition_begin - tile.partition_begin) * partial_floats,
        };
    };
    const int64_t num_tasks = static_cast<int64_t>(work.size()) * num_kv_heads;
    const auto attend = [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
            const AttendTask task = task_at(i);
            // If threads are equally fast, each takes every num_threads()-th piece of the work.
            const int64_t following = i + 1 < end ? i + 1 : begin + (end - begin) * num_threads();
            const AttendTask next = task_at(std::min(following, num_tasks - 1));
            kernel.attend(spec, task, following < num_tasks ? &next : nullptr,
                          thread_scratch(kernel.scratch_bytes(spec, task.num_queries)));
        }
    };
    const int64_t grain = std::clamp<int64_t>(num_tasks / (kTasksPerThread * num_threads()), 1, num_kv_heads);
    parallel_for(num_tasks, attend, grain);

    std::vector<const QueryTile*> cut;
    for (const auto& tile : tiles)
        if (tile.partial_offset >= 0) cut.push_back(&tile);
    const auto merge = [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
            const QueryTile& tile = *cut[i / num_kv_heads];
            const int head = static_cast<int>(i % num_kv_heads);
            const MergeTask task{partials_of(tile, head), tile.num_partitions(), tile.num_queries, sinks_of(head),
                                 out_of(tile, head)};
            kernel.merge(spec, task);
        }
    };
    parallel_for(static_cast<int64_t>(cut.size()) * num_kv_heads, merge, num_kv_heads);
}

void rope_write_kv(const AttentionSpec& spec, const AttentionBatch& batch, DType dtype, const RopeArgs& rope, void* qkv,
                   void* pool, int layer) {
    const AttentionKernels& kernel = kernels(dtype);
    const KvLayer kv = kv_layer(spec, dtype, pool, layer);
    const int64_t row_bytes = spec.row_elements() * item_size(dtype);

    std::vector<RopeTask> tasks;
    for (int s = 0; s < batch.num_seqs; ++s) {
        const int end = batch.query_starts[s + 1];
        const int offset = batch.context_lens[s] - end;  // position minus row
        const int32_t* table = batch.block_table + batch.table_starts[s];
        for (int row = batch.query_starts[s]; row < end;) {
            const int position = row + offset;
            const int num_tokens = std::min(end - row, kGroupTokens - position % kGroupTokens);
            tasks.push_back({kv.layer_block(table[position / spec.block_size]), position % spec.block_size, num_tokens,
                             batch.positions + row, static_cast<std::byte*>(qkv) + row * row_bytes});
            row += num_tokens;
        }
    }
    const auto body = [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) kernel.rope_write(spec, rope, tasks[i]);
    };
    parallel_for(static_cast<int64_t>(tasks.size()), body);
}

}  // namespace swiftkv
