#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"
#include "elementwise.h"
#include "isa.h"

// Causal attention over a paged KV pool, and the step before it (per-head RMSNorm, rotary embedding, KV write).
//
// A sequence's result does not depend, bit for bit, on the rest of the batch, the chunks of its prompt or the number of
// threads: keys are divided into partitions of equal length at absolute positions, each with its own softmax, and
// partitions are merged in ascending order.
namespace swiftkv {

inline constexpr int kGroupTokens = 16;  // a block holds whole groups
inline constexpr int kMaxHeadDim = 256;

struct AttentionSpec {
    int num_heads;
    int num_kv_heads;
    int head_dim;    // of queries and keys
    int v_head_dim;  // of values and results
    int block_size;
    int window;  // 0: a query sees every earlier key
    float scale;
    float soft_cap;  // scores become soft_cap * tanh(score / soft_cap); 0: no cap

    int group_size() const { return num_heads / num_kv_heads; }
    int64_t kv_elements() const { return int64_t{num_kv_heads} * (head_dim + v_head_dim); }  // of a token
    int64_t row_elements() const { return int64_t{num_heads} * head_dim + kv_elements(); }
    int64_t layer_block_elements() const { return block_size * kv_elements(); }
    // The offsets of a KV head's keys and values in a layer block, in elements.
    int64_t k_offset(int head) const { return int64_t{head} * head_dim * block_size; }
    int64_t v_offset(int head) const { return k_offset(num_kv_heads) + int64_t{head} * v_head_dim * block_size; }
    int first_visible(int position) const { return window > 0 && position >= window ? position - window + 1 : 0; }
};

// The scheduler's plan of one step. The new tokens of sequence s are rows query_starts[s] .. query_starts[s+1];
// the last of them has position context_lens[s] - 1.
struct AttentionBatch {
    const int32_t* positions;     // [num_tokens], rows of the cos/sin table
    const int32_t* query_starts;  // [num_seqs + 1]
    const int32_t* context_lens;  // [num_seqs]
    const int32_t* block_table;   // entries: layer block of layer 0, or ~(layer block of every layer)
    const int32_t* table_starts;  // [num_seqs + 1]
    int num_seqs;
};

// One layer of a KV group.
struct KvLayer {
    std::byte* base;
    int64_t layer_block_bytes;
    int layer;

    std::byte* layer_block(int32_t entry) const {
        const int64_t index = entry < 0 ? ~entry : static_cast<int64_t>(entry) + layer;
        return base + index * layer_block_bytes;
    }
};

struct RopeArgs {
    const float* cos_sin;  // [max_len, rotary_dim]: cosines, then sines
    int rotary_dim;
    const void* q_norm;  // [head_dim], or nullptr
    const void* k_norm;
    NormWeight norm_weight;
    float eps;
};

// Normalises and rotates q and k in place, and writes k and v to the pool.
// qkv: [num_tokens, (num_heads + num_kv_heads) * head_dim + num_kv_heads * v_head_dim].
void rope_write_kv(const AttentionSpec& spec, const AttentionBatch& batch, DType dtype, const RopeArgs& rope, void* qkv,
                   void* pool, int layer);

// Attends from every new token to its context. sinks: [num_heads], the score of one more key, neither scaled nor
// capped, whose value is zero; or nullptr. out: [num_tokens, num_heads * v_head_dim].
void attention(const AttentionSpec& spec, const AttentionBatch& batch, DType dtype, const void* qkv, const void* pool,
               int layer, const float* sinks, void* out);

// ---- Provided by one file per instruction set ----

// Consecutive queries of one sequence against one KV head.
struct AttendTask {
    KvLayer kv;
    const int32_t* table;  // of the sequence
    int kv_head;
    int first_position;
    int num_queries;
    int partition_begin, partition_end;
    const void* q;       // first query, first query head of the KV head
    const float* sinks;  // of the KV head's query heads, or nullptr
    void* out;
    float* partial;  // nullptr, or room for the rows of the task's only partition: see partial_floats
};

struct MergeTask {
    float* partials;  // [num_partitions, num_queries * group_size, v_head_dim + 2]
    int num_partitions;
    int num_queries;
    const float* sinks;  // of the KV head's query heads, or nullptr
    void* out;
};

struct RopeTask {
    std::byte* layer_block;
    int offset_in_block;  // of the first token in the block; all tokens lie in one group of kGroupTokens
    int num_tokens;
    const int32_t* positions;
    void* rows;  // of qkv
};

struct AttentionKernels {
    int partition_tokens;  // keys per softmax
    int rows_per_task;     // the queries, times query heads per KV head, that share a pass over the keys
    int64_t (*scratch_bytes)(const AttentionSpec&, int num_queries);
    // `next`: the task that the thread will probably do after this one, or null. Its first keys are fetched ahead.
    void (*attend)(const AttentionSpec&, const AttendTask&, const AttendTask* next, std::byte* scratch);
    void (*merge)(const AttentionSpec&, const MergeTask&);  // overwrites the partials
    void (*rope_write)(const AttentionSpec&, const RopeArgs&, const RopeTask&);
};

const AttentionKernels& attention_kernels_avx2(DType dtype);
const AttentionKernels& attention_kernels_avx512(DType dtype);
const AttentionKernels& attention_kernels_avx512_bf16();
const AttentionKernels& attention_kernels_amx();
const AttentionKernels& attention_kernels_amx_emulated();  // needs AVX512-BF16

}  // namespace swiftkv
