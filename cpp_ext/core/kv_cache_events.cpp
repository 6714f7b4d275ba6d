// The part of the cache that reports changes of the prefix index.
#include "kv_cache.h"

namespace swiftkv {

// Reports that the node is about to get block `next`.
void KvCache::tell(NodeId node, int g, BlockId next, const BlockText& text) {
    const BlockId before = index_.block(node, g);
    const BlockPool& pool = groups_[g].pool;
    const auto is_told = [&](BlockId b) { return b != kNone && pool.state(b) != BlockState::kLoading; };
    if (is_told(before)) events_.removed(index_.key(node), g, pool.place(before));
    if (is_told(next)) events_.stored(index_.key(node), g, pool.place(next), text);
}

BlockText KvCache::text_of(std::span<const TokenId> tokens, const BlockKey& root, std::span<const BlockKey> keys,
                           int index) const {
    const auto begin = static_cast<size_t>(index) * block_size_;
    return {tokens.subspan(begin, block_size_), index == 0 ? root : keys[index - 1], index == 0};
}

void KvCache::describe_loading(std::span<const LoadingBlock> loading, std::span<const TokenId> tokens,
                               const BlockKey& root, std::span<const BlockKey> keys) {
    if (!events_.is_on()) return;
    for (const LoadingBlock& load : loading)
        events_.begin_load(load.group, load.block, text_of(tokens, root, keys, load.index));
}

void KvCache::tell_loaded(int g, BlockId block, bool is_loaded) {
    if (!events_.is_on()) return;
    const NodeId node = groups_[g].pool.node(block);
    if (is_loaded && node != kNone) {
        events_.end_load(g, block, index_.key(node));
    } else {
        events_.forget_load(g, block);
    }
}

std::vector<ResidentBlock> KvCache::resident_blocks() const {
    std::vector<ResidentBlock> resident;
    index_.for_each([&](NodeId node) {
        for (int g = 0; g < num_groups(); ++g) {
            const BlockId block = index_.block(node, g);
            if (block == kNone || groups_[g].pool.state(block) == BlockState::kLoading) continue;
            resident.push_back({index_.key(node), g, groups_[g].pool.place(block)});
        }
    });
    return resident;
}

}  // namespace swiftkv
