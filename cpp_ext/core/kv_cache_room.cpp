// The part of the cache that counts the room for blocks.
#include <algorithm>

#include "kv_cache.h"

namespace swiftkv {

// Returns the number of a group's blocks that a table lacks so that tokens up to `chunk_end` can be written; < 0: it
// has more than it needs.
int KvCache::missing(const BlockTable& table, int g, int chunk_end, int prompt_end) const {
    const int end = groups_[g].spec.window == 0 ? prompt_end : chunk_end;
    return ceil_div(end, block_size_) - static_cast<int>(table.groups[g].entries.size());
}

int KvCache::short_group(const BlockTable& table, int chunk_end, int prompt_end, Spare spare) const {
    if (division_.is_shared())
        return division_.fits(wanted_blocks(table, chunk_end, prompt_end, spare), Means::kEviction) ? kNone : 0;
    for (int g = 0; g < num_groups(); ++g)
        if (lacking(g, missing(table, g, chunk_end, prompt_end), spare.of(spec(g)), {}) > 0) return g;
    return kNone;
}

// Returns the number of local blocks that a group has too few to get the needed ones.
int KvCache::lacking(int g, int needed, int spare, Gain gain) const {
    const int wanted = fewest_wanted(g, std::max(0, needed), spare, gain);
    return wanted == 0 ? 0 : std::max(0, wanted - gain.local - groups_[g].pool.available(Place::kLocal));
}

std::vector<int> KvCache::missing_blocks(const BlockTable& table, int chunk_end, int prompt_end) const {
    std::vector<int> needed;
    for (int g = 0; g < num_groups(); ++g) needed.push_back(std::max(0, missing(table, g, chunk_end, prompt_end)));
    return needed;
}

// Returns the number of local blocks that a group wants if `staged` of the `needed` ones are borrowed. Spare blocks
// that could be staged need not stay available here.
int KvCache::wanted_of(int g, int needed, int spare, int staged, Gain gain) const {
    const int over = overdraft(g, gain);
    if (needed == 0 && over == 0) return 0;
    return needed - staged + over + std::max(0, spare - (available_staged(g, gain) - staged));
}

// Returns the fewest local blocks that a group wants: as many as possible are borrowed.
int KvCache::fewest_wanted(int g, int needed, int spare, Gain gain) const {
    if (needed == 0 && overdraft(g, gain) == 0) return 0;
    return wanted_of(g, needed, spare, std::min(needed, available_staged(g, gain)), gain);
}

std::vector<int> KvCache::wanted_blocks(const BlockTable& table, int chunk_end, int prompt_end, Spare spare) const {
    std::vector<int> wanted = missing_blocks(table, chunk_end, prompt_end);
    for (int g = 0; g < num_groups(); ++g) wanted[g] = fewest_wanted(g, wanted[g], spare.of(spec(g)), {});
    return wanted;
}

int KvCache::releases_needed(const BlockTable& table, int chunk_end, int prompt_end, int spare,
                             std::span<const BlockTable* const> tables) {
    const int most = static_cast<int>(tables.size());
    // The lengths of the tables tell at once where displacement is out of the question.
    if (!has_room_with(most_gains(tables), table, chunk_end, prompt_end, spare - most)) return kNone;
    std::vector<Gain> gains(groups_.size());
    const auto has_room_without = [&](int count) {
        return has_room_with(gains, table, chunk_end, prompt_end, spare - count);
    };
    int count = 0;
    for (; count < most && !has_room_without(count); ++count) {
        for (int g = 0; g < num_groups(); ++g) {
            const Gain gain = gain_of(g, *tables[count]);
            gains[g].local += gain.local;
            gains[g].staged += gain.staged;
        }
    }
    for (const BlockTable* gone : tables.first(count))
        for (int g = 0; g < num_groups(); ++g)
            for (size_t i = gone->groups[g].first; i < gone->groups[g].entries.size(); ++i)
                groups_[g].num_gone[block_of(g, gone->groups[g].entries[i])] = 0;
    return has_room_without(count) ? count : kNone;
}

// Returns no less than tables can leave: each of their blocks counts, wherever it lies and whoever else holds it.
std::vector<Gain> KvCache::most_gains(std::span<const BlockTable* const> tables) const {
    std::vector<Gain> gains(groups_.size());
    for (const BlockTable* table : tables) {
        for (int g = 0; g < num_groups(); ++g) {
            const BlockTable::Group& held = table->groups[g];
            const int num_held = static_cast<int>(held.entries.size()) - held.first;
            gains[g].local += num_held;
            if (can_borrow()) gains[g].staged += num_held;
        }
    }
    return gains;
}

bool KvCache::is_short_of_loads(const BlockTable& table, int chunk_end, int prompt_end) const {
    if (!has_loading() && !has_moves_up()) return false;
    std::vector<Gain> gains;
    for (const KvGroup& group : groups_)
        gains.push_back(
            {.local = group.pool.count(Place::kLocal, BlockState::kLoading) + static_cast<int>(group.moves_up.size())});
    return has_room_with(gains, table, chunk_end, prompt_end, 0);
}

// Returns the number of blocks that have no holder left once this table and the tables that `num_gone` counts have let
// go of them. Adds this table to `num_gone`.
Gain KvCache::gain_of(int g, const BlockTable& table) {
    const BlockPool& pool = groups_[g].pool;
    std::vector<int>& num_gone = groups_[g].num_gone;
    num_gone.resize(pool.num_ids());
    const BlockTable::Group& held = table.groups[g];
    Gain gain;
    for (size_t i = held.first; i < held.entries.size(); ++i) {
        const BlockId block = block_of(g, held.entries[i]);
        if (++num_gone[block] < pool.refs(block) || pool.is_busy(block)) continue;
        gain.local += pool.place(block) == Place::kLocal;
        gain.staged += pool.place(block) == Place::kPeer && !pool.is_leaving(block);
    }
    return gain;
}

bool KvCache::has_room_with(std::span<const Gain> gains, const BlockTable& table, int chunk_end, int prompt_end,
                            int spare) const {
    std::vector<int> wanted = missing_blocks(table, chunk_end, prompt_end);
    for (int g = 0; g < num_groups(); ++g) wanted[g] = fewest_wanted(g, wanted[g], spare, gains[g]) - gains[g].local;
    return division_.fits(wanted, Means::kCompaction);
}

int KvCache::window_room_end(const BlockTable& table, int chunk_end, int prompt_end, Spare spare) const {
    int num_blocks = ceil_div(chunk_end, block_size_);
    if (division_.is_shared()) {
        const auto is_short = [&](int blocks) {
            return short_group(table, blocks * block_size_, prompt_end, spare) != kNone;
        };
        // Bisects between a number of blocks that fits, or that the table already has, and one that does not fit.
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
        const int room = std::max(0, available(g) - spare.of(spec(g)) - overdraft(g));
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
    if (division_.is_shared())
        return division_.fits(wanted_blocks(table, num_tokens, num_tokens, {spare}), Means::kNone);
    for (int g = 0; g < num_groups(); ++g) {
        const int missing = ceil_div(num_tokens, block_size_) - static_cast<int>(table.groups[g].entries.size());
        if (missing > 0 && groups_[g].pool.num_free(Place::kLocal) < missing + spare) return false;
    }
    return true;
}

int64_t KvCache::room_version(int group) const {
    // All terms only grow, so their sum changes whenever one of them does.
    if (division_.is_shared()) group = kNone;  // another group can take what one lets go
    int64_t version = group == kNone || groups_[group].spec.window > 0 ? num_window_losses_ : 0;
    for (int g = 0; g < num_groups(); ++g)
        if (group == kNone || group == g) version += groups_[g].pool.num_room_changes() + groups_[g].num_unfreshed;
    return version;
}

// The room grows by no more blocks than its version: in a pool with staged blocks, by the layers of a block for each.
// It is not known so exactly where an extent changes hands, or a shorter match needs fewer blocks of a window.
int KvCache::least_growth(int g, const BlockTable& table, int chunk_end, int prompt_end, int spare,
                          std::span<const BlockTable* const> leaving) const {
    if (division_.is_shared() || spec(g).window > 0) return leaving.empty();
    const int blocks = lacking(g, missing(table, g, chunk_end, prompt_end), spare, most_gains(leaving)[g]);
    return can_borrow() ? ceil_div(blocks, spec(g).num_layers) : blocks;
}

int KvCache::available(int g) const {
    return groups_[g].pool.available(Place::kLocal) + available_staged(g, {});
}

// Returns the number of available borrowed blocks that could be staged: others are of no use.
int KvCache::available_staged(int g, Gain gain) const {
    const int below = groups_[g].pool.available(Place::kPeer) + gain.staged;
    return std::clamp(num_unstaged(g) + gain.staged, 0, below);
}

int KvCache::num_unstaged(int g) const {
    return num_staging_layer_blocks(g) - groups_[g].pool.count(Place::kPeer, BlockState::kUsed);
}

// Returns the number of borrowed blocks in use that cannot be staged and must move to the pool.
int KvCache::overdraft(int g, Gain gain) const {
    return can_borrow() ? std::max(0, -num_unstaged(g) - gain.staged) : 0;
}

}  // namespace swiftkv
