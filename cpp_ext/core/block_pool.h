// The blocks of one KV group: their holders, and which are cached, free, lent or borrowed.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <span>
#include <vector>

#include "../common/extents.h"
#include "free_set.h"
#include "house.h"
#include "types.h"

namespace swiftkv {

enum class BlockState : uint8_t {
    kAbsent,    // its extent is not held: the lender has it; if it is local, another KV group has it, or none; if it is
                // in host memory, nothing here uses it
    kFree,      // its bytes are not needed
    kUsed,      // running requests hold references to it (it may be in the prefix index too)
    kCached,    // in the prefix index, and no request holds it; evicted by worth, then in least-recently-used order
    kInFlight,  // steps in progress may still read or write it; cached or free once they settle
    kLent,      // local: lent to another engine
    kStaging,   // local: part of the layer-stream cache, in whose layer blocks borrowed blocks are staged
    kLoading,   // local: its bytes are on their way up; in host memory: its pin is being taken over; requests that find
                // it in the prefix index wait for it
    kLeaving,   // borrowed: in the prefix index, held by no request, in a recalled extent: it will move or be forgotten
};
inline constexpr int kNumBlockStates = 9;

// The tenancy of one KV group in a house. `house` is null if the group has all of its local blocks to itself.
struct Tenancy {
    House* house = nullptr;
    int group = 0;
    int blocks_per_extent = 0;
};

// The blocks of one KV group. Every block is in exactly one state, so for local ones free + used + cached + lent +
// in flight + staging + loading + absent = total. Extents come and go in O(blocks per extent), whatever the size of the
// pool.
class BlockPool {
  public:
    BlockPool(int num_local, const std::vector<Link>& lend_links, const std::vector<Link>& borrow_links,
              Tenancy tenancy = {}, int num_host = 0);

    int num_local() const { return num_local_; }
    int num_ids() const { return num_ids_; }
    Place place(BlockId block) const {
        int place = 0;
        while (block >= ends_[place]) ++place;
        return static_cast<Place>(place);
    }
    int count(Place place, BlockState state) const { return counts_[static_cast<int>(place)][static_cast<int>(state)]; }
    int num_free(Place place) const { return count(place, BlockState::kFree); }
    int num_cached(Place place) const { return count(place, BlockState::kCached); }
    // The number of blocks that an allocation could have: free ones, and cached ones by eviction. None is in a
    // recalled extent.
    int available(Place place) const { return num_free(place) + num_cached(place); }

    // A counter that grows whenever an allocation that failed before may succeed, by at least the number of blocks that
    // are newly available.
    int64_t num_room_changes() const { return num_room_changes_; }
    // A counter that grows whenever a block changes its state, or an extent ceases to be held or kept.
    int64_t num_moves() const { return num_moves_; }

    // Takes the lowest free block for one holder and returns it; kNone if no block is free.
    BlockId take(Place place);
    BlockId take(BlockId free);
    // Adds a holder to a used block, or the first one to a cached block, which becomes used again.
    void add_ref(BlockId block);
    // Removes a holder. After the last one the block is cached (or leaving) if the prefix index knows it, else free.
    void drop_ref(BlockId block);
    // Undoes the last add_ref(): a block that was cached gets back its position in the order of eviction. Several are
    // undone from the last to the first. Nothing else may have changed since.
    void undo_ref(BlockId block);
    // Removes a holder while steps in progress may still use the block: after the last one it is in flight until they
    // settle.
    void retire(BlockId block);
    // Begins to plan a step. Steps settle in this order; cancel_step() gives up the last one while it is being planned.
    void begin_step() { ++num_begun_; }
    void cancel_step() { --num_begun_; }
    void settle();
    // Whether the step planned last copies bytes to a block that has holders.
    bool is_moving(BlockId used) const { return record(used).busy_until == num_begun_; }
    bool is_busy(BlockId block) const { return record(block).busy_until > 0; }
    // Notes that the prefix index has forgotten a block, in whatever state that is.
    void forget(BlockId block);
    // Puts `to`, just taken, instead of `from` in the index and for its holders; the step that is being planned
    // copies the bytes. A local `from` is free at once, because spills come first in a step; a borrowed one when the
    // step settles.
    void replace(BlockId from, BlockId to);

    BlockState state(BlockId block) const { return record(block).state; }
    NodeId node(BlockId block) const { return record(block).node; }
    void set_node(BlockId block, NodeId node) { record(block).node = node; }
    int refs(BlockId block) const { return record(block).refs; }
    Worth worth(BlockId block) const { return record(block).worth; }
    // Changes the worth of a block. A cached block whose worth falls is evicted before all others of its new worth.
    // With `is_seen`, see_next() may leave it out.
    void set_worth(BlockId block, Worth worth, bool is_seen = false);

    // Returns the least recently used of the cached blocks that are worth least; kNone if none is cached.
    BlockId oldest_cached(Place place) const;
    // Calls visit(block) for cached blocks, those in the place furthest down first, each place in its order of
    // eviction, until visit() returns false.
    template <class Visit>
    void for_each_cached(Visit&& visit) const {
        for (int place = kNumPlaces - 1; place >= 0; --place) {
            for (int worth = 0; worth < kNumWorths; ++worth) {
                const BlockId end = sentinel(static_cast<Place>(place), static_cast<Worth>(worth));
                for (BlockId b = records_[end].newer; b != end; b = records_[b].newer)
                    if (!visit(b)) return;
            }
        }
    }

    // Looks at the first `most` cached blocks in the same order, first borrowed and then local ones, and calls
    // see(block) for those that it has not seen since they were cached. Ends when see() returns false; that block does
    // not count as seen.
    template <class See>
    void see_next(int most, See&& see) {
        for (const Place place : {Place::kPeer, Place::kLocal}) {
            for (int worth = 0; worth < kNumWorths && most > 0; ++worth) {
                CachedList& list = list_of(sentinel(place, static_cast<Worth>(worth)));
                while (list.num_seen < std::min(most, list.size)) {
                    const BlockId block = records_[list.last_seen].newer;
                    if (!see(block)) return;
                    mark_seen(list, block);
                }
                most -= list.size;
            }
        }
    }
    // Makes see_next() call see() for all blocks again.
    void forget_seen();

    // ---- a house: local extents that groups share ----
    // Adds an extent to the group; all of its blocks are free. Some of them must be taken before the next call that
    // frees a block: an extent whose blocks are all free goes back to the house.
    void enter(ExtentId extent);
    // The number of open extents: they hold only free and cached blocks, and no step keeps them.
    int num_open() const { return num_open_; }
    bool is_open(ExtentId extent) const {
        const HouseExtent& held = house_extents_[extent];
        return held.is_held && held.num_occupied == 0 && held.num_kept == 0;
    }
    // Keeps the block's extent with the group until the step that is being planned settles: the step reads the block's
    // bytes while its layers run, even if the block has another holder by then.
    void keep_extent_of(BlockId local);
    // The number of used blocks of an extent if only they keep it from other groups; else 0.
    int num_used_alone(ExtentId extent) const;
    // Returns the last cached block of the oldest open extent. The oldest is the one whose last cached block is evicted
    // first. kNone if no extent is open.
    BlockId last_of_oldest_open() const;
    // Return the lowest free block, and the cached block that is evicted first, in extents with used or otherwise busy
    // blocks, other than `extent`.
    BlockId free_beside_used(ExtentId extent) const;
    BlockId oldest_cached_beside_used(ExtentId extent) const;
    ExtentId house_extent(BlockId local) const { return local / tenancy_.blocks_per_extent; }
    int house_extent_blocks() const { return tenancy_.blocks_per_extent; }
    uint32_t cached_at(BlockId block) const { return record(block).cached_at; }

    // ---- loading ----
    // Turns the lowest free local block into a loading one and returns it; kNone if no local block is free.
    BlockId start_loading();
    // Turns a loading block into a cached one if the prefix index knows it, else into a free one, or an absent one if
    // it is in host memory.
    void stop_loading(BlockId block);

    // ---- host memory: chunks that this engine has pinned ----
    BlockId host_block(int chunk) const { return first_of(Place::kHost) + chunk; }
    int chunk_of(BlockId host) const { return host - first_of(Place::kHost); }
    // Turns an absent block in host memory, whose chunk the caller has pinned, into a loading one.
    void start_loading(BlockId absent);
    // Notes that a step has copied a block from a chunk, and needs its pin no more.
    void note_unpinned(int chunk) { unpinned_.push_back({chunk, 0}); }
    // Returns the chunks whose blocks have become absent since the last call, and which no step uses any more, and
    // those of note_unpinned(). A chunk may be named several times, once for each pin.
    std::vector<int> take_unpinned();

    // ---- layer-stream cache ----
    // Turns the highest free local block into a staging one and returns it; kNone if no local block is free.
    BlockId start_staging();
    void start_staging(BlockId free);
    void stop_staging(BlockId block);

    // ---- lending: extents of the local pool ----
    // Throws std::invalid_argument unless these extents can be taken back.
    void check_lent(int lend_link, std::span<const ExtentId> extents) const;
    // Returns up to `max_extents` extents that could be lent: wholly free ones, highest first; then, if `or_cached`,
    // extents that hold only free and cached blocks, in the order in which these are evicted.
    std::vector<int> lendable(int lend_link, int max_extents, bool or_cached) const;
    void lend(int lend_link, int extent) noexcept;  // its blocks must all be free
    void take_back(int lend_link, int extent) noexcept;
    BlockId first_block(int lend_link, int extent) const {
        return extent * lend_links_[lend_link].link.blocks_per_extent;
    }
    int blocks_per_extent(int lend_link) const { return lend_links_[lend_link].link.blocks_per_extent; }
    int num_lend_extents(int lend_link) const { return lend_links_[lend_link].link.num_extents; }

    // ---- borrowing: extents of others' pools ----
    // These throw std::invalid_argument unless these extents can be borrowed, or recalled.
    void check_not_held(int borrow_link, std::span<const ExtentId> extents) const;
    void check_held(int borrow_link, std::span<const ExtentId> extents) const;
    void borrow(int borrow_link, int extent) noexcept;
    // Ends allocation in the extent: its free blocks are given up, and so is each block that is freed later. Its cached
    // blocks become leaving.
    void recall(int borrow_link, int extent) noexcept;
    // Recalls all extents of a link whose lender is gone; they are not returned.
    void lose(int borrow_link) noexcept;
    // Returns the recalled extents that have been given up whole since the last call.
    std::vector<int> take_returned(int borrow_link);
    bool is_draining() const { return num_draining_ > 0; }
    // The number of blocks in extents that are held and not recalled.
    int num_held() const { return num_held_blocks_; }
    bool is_leaving(BlockId block) const;  // whether it is in an extent that is recalled or lost
    bool is_lost(BlockId block) const;
    // Call visit(block) for every block that is not absent, in recalled and lost extents, or in those of one link.
    void for_each_leaving(const std::function<void(BlockId)>& visit) const;
    void for_each_of_link(int borrow_link, const std::function<void(BlockId)>& visit) const;
    // The link of a borrowed block, and the offset of its bytes in the lender's pool.
    struct Location {
        int link;
        int64_t offset_bytes;
    };
    Location locate(BlockId borrowed, int64_t block_bytes) const;

    // Checks all invariants. `refs[b]`: the number of references to block b that requests hold. Throws
    // std::runtime_error if one is violated.
    void check(const std::vector<int>& refs) const;

  private:
    struct Record {
        int refs = 0;
        NodeId node = kNone;
        BlockId newer = kNone, older = kNone;  // neighbours in the list of cached blocks
        BlockState state = BlockState::kAbsent;
        Worth worth = Worth::kNone;
        uint8_t list = 0;        // the list of cached blocks that it is in, or was in last
        bool is_seen = false;    // whether see_next() has seen it in that list
        uint32_t cached_at = 0;  // the pool's clock when it was cached last
        int64_t busy_until = 0;  // the number, from 1, of the last step that may read or write it; a block without
                                 // holders is in flight until that step settles
    };
    // The cached blocks of one place and one worth, in a circular list. The first ones have been seen by see_next().
    struct CachedList {
        BlockId last_seen;  // the sentinel if no block was seen
        int size = 0, num_seen = 0;
    };
    struct LendLink {
        Link link;
        std::vector<int> num_occupied, num_cached;  // per extent: blocks neither free nor cached; cached blocks
        FreeSet clean;                              // the extents whose blocks are all free
        std::vector<bool> is_lent;                  // per extent; another link may lend the same blocks
    };
    struct HouseExtent {
        int num_occupied = 0, num_cached = 0;  // blocks neither absent nor free nor cached; cached blocks
        int num_kept = 0;                      // calls of keep_extent_of() for steps that have not settled
        bool is_held = false;
    };
    struct KeptExtent {
        ExtentId extent;
        int64_t until;  // the number of a step, from 1
    };
    struct UnpinnedChunk {
        int chunk;
        int64_t until;  // the number of the last step that may read it; 0: none
    };
    enum class Tenure : uint8_t { kNone, kHeld, kRecalled, kLost };
    struct BorrowLink {
        Link link;
        BlockId first;
        std::vector<Tenure> tenure;    // per extent
        std::vector<int> num_present;  // per extent: blocks that are not absent
        std::vector<int> returned;
    };

    Record& record(BlockId block) {
        ensure(static_cast<uint32_t>(block) < static_cast<uint32_t>(num_ids_), "a block is one of the pool's");
        return records_[block];
    }
    const Record& record(BlockId block) const { return const_cast<BlockPool*>(this)->record(block); }
    void move_to(BlockId block, BlockState state);
    void set_busy(BlockId block);
    void rest(BlockId block);     // its last holder has left
    void release(BlockId block);  // makes it free, or absent if its extent is leaving
    void count_extents(BlockId local, BlockState state, int by);
    bool is_beside_used(BlockId local, ExtentId not_in) const {
        return house_extent(local) != not_in && house_extents_[house_extent(local)].num_occupied > 0;
    }
    void count_in_house(BlockId local, BlockState before, BlockState after);
    void leave(ExtentId extent);
    bool is_empty(ExtentId extent) const;
    void settle_kept_extents();
    BlockId find_last_of_oldest_open() const;
    bool is_in_oldest_open(BlockId local) const {
        return last_of_oldest_open_ != kNone && house_extent(local) == house_extent(last_of_oldest_open_);
    }
    void link_newest(BlockId block);
    void link_before(BlockId newer, BlockId block, bool is_seen = false);
    void unlink(BlockId block);
    CachedList& list_of(BlockId linked) { return cached_lists_[records_[linked].list]; }
    void mark_seen(CachedList& list, BlockId block);
    void forget_seen(CachedList& list);
    BlockId sentinel(Place place, Worth worth) const {
        return num_ids() + static_cast<int>(place) * kNumWorths + static_cast<int>(worth);
    }
    BlockId first_of(Place place) const { return place == Place::kLocal ? 0 : ends_[static_cast<int>(place) - 1]; }
    const BorrowLink& borrow_link_of(BlockId borrowed) const;
    BorrowLink& borrow_link_of(BlockId borrowed);
    static int extent_of(const BorrowLink& link, BlockId block) {
        return (block - link.first) / link.link.blocks_per_extent;
    }
    void give_up(BlockId borrowed);
    // Parts of check().
    void check_blocks(const std::vector<int>& refs) const;
    void check_cached_lists() const;
    void check_lend_link(const LendLink& lend) const;
    void check_borrow_links() const;
    void check_house() const;
    void check_busy() const;

    int num_local_;
    std::array<BlockId, kNumPlaces> ends_;  // one past the last block of each place
    int num_ids_;
    std::vector<Record> records_;  // by block; then the sentinels of the circular lists of cached blocks
    std::vector<CachedList> cached_lists_;
    std::vector<FreeSet> free_;
    std::array<std::array<int, kNumBlockStates>, kNumPlaces> counts_{};
    std::vector<BlockId> busy_;
    int64_t num_room_changes_ = 0;
    int64_t num_moves_ = 0;
    int64_t num_begun_ = 0, num_settled_ = 0;  // steps
    uint32_t num_cachings_ = 0;                // the clock of `cached_at` if there is no house; may wrap
    Tenancy tenancy_;
    std::vector<HouseExtent> house_extents_;
    std::vector<KeptExtent> kept_extents_;
    std::vector<UnpinnedChunk> unpinned_;
    int num_open_ = 0;
    mutable BlockId last_of_oldest_open_ = kNone;  // kNone: not known
    std::vector<LendLink> lend_links_;
    std::vector<BorrowLink> borrow_links_;
    int num_held_blocks_ = 0;
    int num_draining_ = 0;  // present blocks of recalled extents
};

}  // namespace swiftkv
