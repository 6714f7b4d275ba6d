#include "division.h"

#include <algorithm>
#include <climits>
#include <ranges>

namespace swiftkv {

Division::Division(const std::vector<GroupSpec>& specs, const std::vector<KvGroup>& groups, bool can_borrow,
                   int extents_for_windows)
    : groups_(groups),
      can_borrow_(can_borrow),
      extents_for_windows_(extents_for_windows),
      house_(specs[0].blocks_per_extent == 0
                 ? nullptr
                 : std::make_unique<House>(specs[0].num_blocks / specs[0].blocks_per_extent)) {}

// ---- room now ----

bool Division::fits(std::span<const int> wanted, Means means) const {
    if (is_shared())
        return means == Means::kNone ? has_free_extents(wanted)
                                     : spare_extents(wanted, means == Means::kCompaction) >= 0;
    for (int g = 0; g < size(); ++g) {
        const int room = means == Means::kNone ? groups_[g].pool.num_free(Place::kLocal) : available(g);
        if (wanted[g] > room) return false;
    }
    return true;
}

// Returns the number of extents that are left when every group has the wanted blocks; < 0: so many are missing. Groups
// with more blocks than they want give up open extents, or, if `is_compacted`, as many extents as their surplus fills.
int Division::spare_extents(std::span<const int> wanted, bool is_compacted) const {
    int extents = house_->num_free() - missing_extents(wanted);
    for (int g = 0; g < size(); ++g) {
        const BlockPool& pool = groups_[g].pool;
        const int full = std::max(0, available(g) - wanted[g]) / pool.house_extent_blocks();
        extents += is_compacted ? full : std::min(pool.num_open(), full);
    }
    return can_borrow_ ? std::min(extents, spare_for_histories(wanted, is_compacted)) : extents;
}

// Whether free blocks and extents without an owner suffice, so that no block need be evicted.
bool Division::has_free_extents(std::span<const int> wanted) const {
    int extents = house_->num_free();
    for (int g = 0; g < size(); ++g) {
        const BlockPool& pool = groups_[g].pool;
        const int lacking = std::max(0, wanted[g] - pool.num_free(Place::kLocal));
        extents -= ceil_div(lacking, pool.house_extent_blocks());
    }
    return extents >= 0 && (!can_borrow_ || spare_for_histories(wanted, false) >= 0);
}

int Division::missing_extents(std::span<const int> wanted) const {
    int extents = 0;
    for (int g = 0; g < size(); ++g)
        extents += ceil_div(std::max(0, wanted[g] - available(g)), groups_[g].pool.house_extent_blocks());
    return extents;
}

int Division::obtainable(int g) const {
    const int free = is_shared() && may_grow(g) ? house_->num_free() * groups_[g].pool.house_extent_blocks() : 0;
    return available(g) + free;
}

int Division::unclaimed(int g) const {
    if (!is_shared()) return 0;
    const bool is_limited = can_borrow_ && !groups_[g].has_window();
    const int num_free = house_->num_free();
    const int extents = is_limited ? std::clamp(num_left_for_histories(), 0, num_free) : num_free;
    return extents * groups_[g].pool.house_extent_blocks();
}

// ---- room for a sequence that is alone ----

int Division::num_home_blocks(int g) const {
    // In a shared division the first group lends for all of them, and each group lacks the lent extents.
    const KvGroup& lender = groups_[is_shared() ? 0 : g];
    const int num_home = lender.spec.num_blocks - lender.pool.count(Place::kLocal, BlockState::kLent);
    return is_shared() ? num_home / lender.spec.blocks_per_extent * spec(g).blocks_per_extent : num_home;
}

bool Division::fits_alone(std::span<const int> num_blocks) const {
    if (!is_shared()) {
        for (int g = 0; g < size(); ++g)
            if (num_blocks[g] > num_home_blocks(g) - staging_target(g)) return false;
        return true;
    }
    int of_histories = 0, of_windows = 0;
    for (int g = 0; g < size(); ++g)
        (groups_[g].has_window() ? of_windows : of_histories) +=
            staging_extents_of(g) + extents_for(spec(g), num_blocks[g]);
    return of_histories + std::max(of_windows, borrows() ? extents_for_windows_ : 0) <= num_home_extents();
}

// ---- the layer-stream cache ----

int Division::staging_target(int g) const {
    const KvGroup& group = groups_[g];
    const BlockPool& pool = group.pool;
    if (!is_shared()) {
        const int own = pool.num_local() - pool.count(Place::kLocal, BlockState::kLent);
        return std::min(own, ceil_div(pool.num_held(), group.spec.num_layers));
    }
    // Keeps room for the used blocks that are staged, even if fewer blocks are borrowed now.
    const int size = pool.house_extent_blocks();
    const int used = ceil_div(pool.count(Place::kPeer, BlockState::kUsed), size * group.spec.num_layers);
    return std::max(staging_extents_of(g), std::min(used, static_cast<int>(group.staging.size()) / size)) * size;
}

// Returns the number of extents that stage a group's blocks. A whole extent stages blocks of one group, because no
// group could own an extent with layer blocks of several.
int Division::staging_extents_of(int group) const {
    int left = std::max(0, num_home_extents() - extents_for_windows_);
    for (int g = 0; g < group; ++g) left -= staging_extents(spec(g), groups_[g].pool.num_held(), left);
    return staging_extents(spec(group), groups_[group].pool.num_held(), left);
}

bool Division::can_stage_more(int g) const {
    if (!is_shared()) return available(g) > 0;
    if (has_extent_for(g)) return true;
    for (int h = 0; h < size(); ++h)
        if (groups_[h].pool.num_open() > 0 && may_take_from(g, h)) return true;
    return false;
}

// ---- extents that change hands ----

bool Division::has_extent_for(int g, int num_others) const {
    return house_->num_free() > num_others && may_grow(g);
}

bool Division::may_grow(int g) const {
    return !can_borrow_ || groups_[g].has_window() || num_left_for_histories() > 0;
}

// Whether the group may take an extent from another one.
bool Division::may_take_from(int g, int other) const {
    return g == other || !groups_[other].has_window() || may_grow(g);
}

int Division::cheapest_donor(int g, std::span<const int> wanted) const {
    CachedBlock cheapest{kNone, kNone};
    for (int h = 0; h < size(); ++h) {
        const BlockPool& pool = groups_[h].pool;
        if (h == g || pool.available(Place::kLocal) - wanted[h] < pool.house_extent_blocks()) continue;
        if (!may_take_from(g, h)) continue;
        const CachedBlock last = last_of_oldest_open(h);
        if (last.block == kNone || (cheapest.group != kNone && goes_before(cheapest, last))) continue;
        cheapest = last;
    }
    return cheapest.group;
}

int Division::history_to_shrink() const {
    if (!is_shared() || !can_borrow_ || num_left_for_histories() >= 0) return kNone;
    CachedBlock oldest{kNone, kNone};
    for (int g = 0; g < size(); ++g) {
        if (groups_[g].has_window() || groups_[g].pool.num_open() == 0) continue;
        const CachedBlock last = last_of_oldest_open(g);
        if (oldest.group == kNone || goes_before(last, oldest)) oldest = last;
    }
    return oldest.group;
}

// Does what spare_extents() does for the extents that histories may have; returns INT_MAX if histories lack none.
int Division::spare_for_histories(std::span<const int> wanted, bool is_compacted) const {
    int extents = num_left_for_histories(), missing = 0;
    for (int g = 0; g < size(); ++g) {
        if (groups_[g].has_window()) continue;
        const BlockPool& pool = groups_[g].pool;
        const int size = pool.house_extent_blocks(), left = available(g) - wanted[g];
        missing += ceil_div(std::max(0, -left), size);
        extents += is_compacted ? std::max(0, left) / size : std::min(pool.num_open(), std::max(0, left) / size);
    }
    return missing == 0 ? INT_MAX : extents - missing;
}

// Returns the number of extents that histories may still take. While anything is borrowed, room for the windows of one
// sequence is kept from them: otherwise a sequence whose history lies here, and not with lenders, could not go on.
int Division::num_left_for_histories() const {
    int left = num_home_extents() - (borrows() ? extents_for_windows_ : 0);
    for (const KvGroup& group : groups_) {
        const BlockPool& pool = group.pool;
        const int held = pool.num_local() - pool.count(Place::kLocal, BlockState::kAbsent) -
                         pool.count(Place::kLocal, BlockState::kLent);
        if (!group.has_window()) left -= held / pool.house_extent_blocks();
    }
    return left;
}

bool Division::borrows() const {
    return std::ranges::any_of(groups_, [](const KvGroup& group) { return group.pool.num_held() > 0; });
}

std::pair<int, ExtentId> Division::extent_to_compact(std::span<const int> wanted) const {
    std::pair<int, ExtentId> found{kNone, kNone};
    int fewest = INT_MAX;
    for (int g = 0; g < size(); ++g) {
        const BlockPool& pool = groups_[g].pool;
        if ((available(g) - wanted[g]) / pool.house_extent_blocks() <= pool.num_open()) continue;
        for (ExtentId extent = 0; extent < house_->num_extents(); ++extent) {
            if (house_->owner(extent) != g) continue;
            const int num_used = pool.num_used_alone(extent);
            if (num_used == 0 || num_used >= fewest) continue;
            fewest = num_used;
            found = {g, extent};
        }
    }
    return found;
}

// A full-attention block is worth as much as a tail: the least recently used of them goes first, with the blocks that
// are of no use without it.
bool Division::goes_before(CachedBlock a, CachedBlock b) const {
    const auto rank = [&](CachedBlock cached) {
        const KvGroup& group = groups_[cached.group];
        return group.has_window() ? group.pool.worth(cached.block) : Worth::kKept;
    };
    const auto cached_at = [&](CachedBlock cached) { return groups_[cached.group].pool.cached_at(cached.block); };
    if (rank(a) != rank(b)) return rank(a) < rank(b);
    return static_cast<int32_t>(cached_at(a) - cached_at(b)) < 0;
}

// ---- lending ----

std::vector<int> Division::lendable(int g, int link, int max_extents, bool or_cached) const {
    return is_shared() ? lendable_of_house(g, link, max_extents, or_cached)
                       : groups_[g].pool.lendable(link, max_extents, or_cached);
}

std::vector<int> Division::lendable_of_house(int g, int link, int max_extents, bool or_cached) const {
    const BlockPool& pool = groups_[g].pool;
    const int size = pool.blocks_per_extent(link) / pool.house_extent_blocks();
    const auto has_owner = [&](ExtentId extent) { return house_->owner(extent) != kNone; };
    std::vector<int> found;
    for (int extent = pool.num_lend_extents(link); extent-- > 0 && static_cast<int>(found.size()) < max_extents;)
        if (std::ranges::none_of(std::views::iota(extent * size, (extent + 1) * size), has_owner))
            found.push_back(extent);
    if (!or_cached || static_cast<int>(found.size()) == max_extents) return found;
    std::vector<std::pair<CachedBlock, int>> others;
    for (int extent = 0; extent < pool.num_lend_extents(link); ++extent) {
        const std::optional<CachedBlock> last = last_to_go(extent * size, size);
        if (last && last->group != kNone) others.emplace_back(*last, extent);
    }
    const auto num_wanted = std::min<std::ptrdiff_t>(max_extents - std::ssize(found), std::ssize(others));
    std::partial_sort(others.begin(), others.begin() + num_wanted, others.end(),
                      [&](const auto& a, const auto& b) { return goes_before(a.first, b.first); });
    for (const auto& [last, extent] : std::span(others).first(num_wanted)) found.push_back(extent);
    return found;
}

// Returns the cached block of consecutive extents that is evicted last; kNone if none is cached there, nullopt if a
// block there is neither cached nor free.
std::optional<CachedBlock> Division::last_to_go(ExtentId first, int num_extents) const {
    CachedBlock last{kNone, kNone};
    for (ExtentId extent = first; extent < first + num_extents; ++extent) {
        const int g = house_->owner(extent);
        if (g == kNone) continue;
        const BlockPool& pool = groups_[g].pool;
        if (!pool.is_open(extent)) return std::nullopt;
        const BlockId begin = extent * pool.house_extent_blocks();
        for (BlockId b = begin; b < begin + pool.house_extent_blocks(); ++b) {
            if (pool.state(b) != BlockState::kCached) continue;
            if (last.group == kNone || goes_before(last, {g, b})) last = {g, b};
        }
    }
    return last;
}

}  // namespace swiftkv
