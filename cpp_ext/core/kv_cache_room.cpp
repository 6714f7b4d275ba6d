// The part of the cache that counts: how much room there is, and for what.
#include <algorithm>

#include "kv_cache.h"

namespace swiftkv {

// The blocks that a table lacks of a group so that tokens up to `chunk_end` can be written; below 0: it has more.
int KvCache::missing(const BlockTable& table, int g, int chunk_end, int prompt_end) const {
    const int end = groups_[g].spec.window == 0 ? prompt_end : chunk_end;
    return ceil_div(end, block_size_) - static_cast<int>(table.groups[g].entries.size());
}

int KvCache::short_group(const BlockTable& table, int chunk_end, int prompt_end, int spare) const {
    if (house_) return spare_extents(wanted_blocks(table, chunk_end, prompt_end, spare), false) < 0 ? 0 : kNone;
    for (int g = 0; g < num_groups(); ++g) {
        const int needed = missing(table, g, chunk_end, prompt_end);
        if ((needed > 0 || overdraft(g) > 0) && available(g) < std::max(0, needed) + spare + overdraft(g)) return g;
    }
    return kNone;
}

int KvCache::window_room_end(const BlockTable& table, int chunk_end, int prompt_end, int spare) const {
    int num_blocks = ceil_div(chunk_end, block_size_);
    if (house_) {
        const auto is_short = [&](int blocks) {
            return short_group(table, blocks * block_size_, prompt_end, spare) != kNone;
        };
        // Halves the distance between what fits, or is nothing new, and what does not.
        int fitting = std::min(capacity(table) / block_size_, num_blocks);
        if (!is_short(num_blocks)) fitting = num_blocks;
        for (int most = num_blocks; most - fitting > 1;) {
            const int middle = (fitting + most) / 2;
            (is_short(middle) ? most : fitting) = middle;
        }
        return std::min(chunk_end, fitting * block_size_);
    }
    for (int g = 0; g < num_groups(); ++g) {
        if (groups_[g].spec.window == 0) continue;
        const int room = std::max(0, available(g) - spare - overdraft(g));
        num_blocks = std::min(num_blocks, static_cast<int>(table.groups[g].entries.size()) + room);
    }
    return std::min(chunk_end, num_blocks * block_size_);
}

int KvCache::capacity(const BlockTable& table) const {
    const auto smaller = [](const BlockTable::Group& a, const BlockTable::Group& b) {
        return a.entries.size() < b.entries.size();
    };
    const auto smallest = std::min_element(table.groups.begin(), table.groups.end(), smaller);
    return static_cast<int>(smallest->entries.size()) * block_size_;
}

bool KvCache::has_free(const BlockTable& table, int num_tokens, int spare) const {
    if (house_) return has_free_extents(wanted_blocks(table, num_tokens, num_tokens, spare));
    for (int g = 0; g < num_groups(); ++g) {
        const int missing = ceil_div(num_tokens, block_size_) - static_cast<int>(table.groups[g].entries.size());
        if (missing > 0 && groups_[g].pool.num_free(Place::kLocal) < missing + spare) return false;
    }
    return true;
}

int64_t KvCache::room_version(int group) const {
    // All of them only grow, so their sum changes whenever one does.
    if (house_) group = kNone;  // what one group lets go, another can have
    int64_t version = group == kNone || groups_[group].spec.window > 0 ? num_window_losses_ : 0;
    for (int g = 0; g < num_groups(); ++g)
        if (group == kNone || group == g) version += groups_[g].pool.num_room_changes() + groups_[g].num_unfreshed;
    return version;
}

int KvCache::available(int g) const {
    return groups_[g].pool.available(Place::kLocal) + available_staged(g);
}

// A borrowed block is of use only while there is a layer block to stage it in.
int KvCache::available_staged(int g) const {
    return std::clamp(num_unstaged(g), 0, groups_[g].pool.available_below(Place::kLocal));
}

int KvCache::num_unstaged(int g) const {
    return num_staging_layer_blocks(g) - groups_[g].pool.count_staged(BlockState::kUsed);
}

// Borrowed blocks in use that cannot be staged: as many must move in.
int KvCache::overdraft(int g) const {
    return can_borrow() ? std::max(0, -num_unstaged(g)) : 0;
}

}  // namespace swiftkv
