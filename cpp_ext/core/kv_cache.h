// The KV blocks of one engine: a pool per KV group, the prefix tree over them, and the tables of the running requests.
#pragma once

#include <span>
#include <vector>

#include "block_pool.h"
#include "prefix_tree.h"
#include "types.h"

namespace swiftkv {

// The blocks of one request. Entries are what kernels read: the layer-block index of layer 0 of the block, which is
// block * num_layers, or kNoBlock. (Negative entries are reserved for borrowed blocks, with the same address for
// every layer.)
struct BlockTable {
    struct Group {
        std::vector<int32_t> entries;
        int first = 0;  // entries before this one are kNoBlock: the sliding window has passed
    };
    std::vector<Group> groups;
    int num_committed = 0;  // full blocks that have entered the prefix tree, or were found in it
};

// Keys of the first tokens.size() / block_size blocks. Appends what `keys` lacks.
void extend_keys(std::vector<BlockKey>& keys, const Hash& root, std::span<const TokenId> tokens, int block_size);

class KvCache {
  public:
    KvCache(std::vector<GroupSpec> groups, int block_size);

    int num_groups() const { return static_cast<int>(groups_.size()); }
    BlockTable make_table() const { return {std::vector<BlockTable::Group>(groups_.size()), 0}; }

    // Gives an empty table the longest usable cached prefix of `keys`, and returns its length in blocks. A prefix is
    // usable if every full-attention group has all its blocks, and every sliding-window group those that the last
    // `window` tokens before its end lie in.
    int acquire_prefix(BlockTable& table, std::span<const BlockKey> keys);
    // Adds blocks so that tokens up to `chunk_end` can be written, in full-attention groups up to `prompt_end`, and
    // leaves `spare` blocks available in every pool; or changes nothing and returns false.
    bool extend(BlockTable& table, int chunk_end, int prompt_end, int spare);
    // The bytes of the table's first `num_blocks` full blocks are written: they enter the prefix tree. Where the tree
    // already has equal bytes the table changes to them.
    void commit(BlockTable& table, std::span<const BlockKey> keys, int num_blocks);
    // Lets go of what no token from `num_computed` on can see.
    void release_outside_window(BlockTable& table, int num_computed);
    void release(BlockTable& table);
    // release() while a step may still be writing to blocks that are not committed: those are free after settle().
    void retire(BlockTable& table);
    void settle();
    // Frees every cached block.
    void reset();

    std::vector<GroupStats> stats() const;
    // `tables` and `keys` of all requests that hold blocks. Throws std::runtime_error on any disagreement.
    void check(std::span<const BlockTable* const> tables, std::span<const std::vector<BlockKey>* const> keys) const;

  private:
    struct Group {
        GroupSpec spec;
        int window_blocks;  // blocks that must be resident before a match's end; 0: all
        BlockPool pool;
    };
    int match(std::span<const BlockKey> keys, std::vector<NodeId>& path) const;
    BlockId take_block(int group);
    void evict(int group, BlockId block);
    void adopt(int group, int32_t& entry, NodeId node);
    BlockId block_of(int group, int32_t entry) const { return entry / groups_[group].spec.num_layers; }
    int32_t entry_of(int group, BlockId block) const { return block * groups_[group].spec.num_layers; }
    void check_table(const BlockTable& table, const std::vector<BlockKey>& keys) const;

    int block_size_;
    std::vector<Group> groups_;
    bool has_full_attention_ = false;
    PrefixTree tree_;
    std::vector<NodeId> path_;  // scratch of acquire_prefix
};

}  // namespace swiftkv
