// The division of the local pool between KV groups.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "../common/extents.h"
#include "house.h"
#include "kv_group.h"
#include "types.h"

namespace swiftkv {

// The means by which wanted blocks may be made free: none, so that they must be free already; the eviction of cached
// blocks; or also moves of used blocks within the pool, after which more extents can change hands.
enum class Means : uint8_t { kNone, kEviction, kCompaction };

struct CachedBlock {
    int group;
    BlockId block;
};

// Says which KV group may have which local blocks. There are two cases. In a fixed division, every group has its blocks
// to itself. In a shared one, the groups have a house: its extents change hands, and peers borrow them in the name of
// the first group.
//
// A division only counts and chooses. KvCache makes the blocks free and gives extents to groups.
//
// `wanted` is, per group, the number of blocks that it is about to take and of those that must stay available beside
// them; 0 for a group that takes none.
//
// A *history* is the blocks of a sequence in the full-attention groups. They grow with the sequence; those of its
// sliding windows do not. In a shared division, histories leave some extents to windows while anything is borrowed.
class Division {
  public:
    // `groups` outlives the division, and may be filled later. `extents_for_windows`: the number of shared extents that
    // never stage borrowed blocks.
    Division(const std::vector<GroupSpec>& specs, const std::vector<KvGroup>& groups, bool can_borrow,
             int extents_for_windows);

    bool is_shared() const { return house_ != nullptr; }
    House* house() { return house_.get(); }  // null if the division is fixed
    const House* house() const { return house_.get(); }

    // ---- room now ----
    // Whether all groups can have the blocks that they want.
    bool fits(std::span<const int> wanted, Means means) const;
    // Returns the number of blocks that the group could get without taking extents from other groups.
    int obtainable(int group) const;
    // Returns the number of blocks in extents without an owner that the group may take.
    int unclaimed(int group) const;

    // ---- room for a sequence that is alone ----
    // The number of the group's local blocks that are not lent; in a shared division, the number that it could have.
    int num_home_blocks(int group) const;
    // The number of shared extents that are not lent.
    int num_home_extents() const { return num_home_blocks(0) / groups_[0].spec.blocks_per_extent; }
    // Whether so many local blocks of each group fit beside the layer-stream cache if nothing else is in the pool.
    bool fits_alone(std::span<const int> num_blocks) const;

    // ---- the layer-stream cache ----
    // The number of blocks that the group's part of the layer-stream cache should have.
    int staging_target(int group) const;
    // Whether that part can grow now.
    bool can_stage_more(int group) const;

    // ---- extents that change hands, in a shared division ----
    // Whether the group may take an extent without an owner and leave `num_others` of them.
    bool has_extent_for(int group, int num_others = 0) const;
    // Returns the number of extents that groups lack to have the wanted blocks available.
    int missing_extents(std::span<const int> wanted) const;
    // Returns another group that can give up an extent and still has the blocks that it wants; kNone if there is none.
    // Among several, the group whose newest block in such an extent would be evicted first.
    int cheapest_donor(int group, std::span<const int> wanted) const;
    // Returns the full-attention group that must give up an extent because windows need it; kNone if none must, or can.
    int history_to_shrink() const;
    // Returns the extent with the fewest used blocks, and its group, which must be able to give up more blocks than its
    // open extents hold; kNone if there is none. Blocks that are in flight, loading, staging or just moved must stay in
    // place.
    std::pair<int, ExtentId> extent_to_compact(std::span<const int> wanted) const;
    // Whether cached block `a` is evicted before `b`.
    bool goes_before(CachedBlock a, CachedBlock b) const;

    // ---- lending ----
    // Returns up to `max_extents` extents that the group could lend over its link `link`: wholly free ones, highest
    // first; then, if `or_cached`, extents that hold only free and cached blocks, in the order in which these are
    // evicted.
    std::vector<int> lendable(int group, int link, int max_extents, bool or_cached) const;

  private:
    int size() const { return static_cast<int>(groups_.size()); }
    const GroupSpec& spec(int group) const { return groups_[group].spec; }
    int available(int group) const { return groups_[group].pool.available(Place::kLocal); }
    CachedBlock last_of_oldest_open(int group) const { return {group, groups_[group].pool.last_of_oldest_open()}; }
    int spare_extents(std::span<const int> wanted, bool is_compacted) const;
    bool has_free_extents(std::span<const int> wanted) const;
    int spare_for_histories(std::span<const int> wanted, bool is_compacted) const;
    int num_left_for_histories() const;
    bool borrows() const;
    bool may_grow(int group) const;
    bool may_take_from(int group, int other) const;
    int staging_extents_of(int group) const;
    std::optional<CachedBlock> last_to_go(ExtentId first, int num_extents) const;
    std::vector<int> lendable_of_house(int group, int link, int max_extents, bool or_cached) const;

    const std::vector<KvGroup>& groups_;
    const bool can_borrow_;
    const int extents_for_windows_;
    const std::unique_ptr<House> house_;  // null if the division is fixed
};

}  // namespace swiftkv
