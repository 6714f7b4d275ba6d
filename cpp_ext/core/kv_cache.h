// The KV blocks of one engine: a pool per KV group, the prefix index over them, and the tables of the running requests.
// The file has more than 400 lines because it is one class: all of its parts see every block that one of them moves.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "boundaries.h"
#include "evictions.h"
#include "house.h"
#include "kv_events.h"
#include "offers.h"
#include "prefix_index.h"
#include "types.h"

namespace swiftkv {

// The blocks of one request. The entry of a local block is what kernels read, block * num_layers; that of a borrowed
// block is staged(block), and the plan of a step puts staged(layer block) in its place.
struct BlockTable {
    struct Group {
        std::vector<int32_t> entries;
        int first = 0;  // entries before this one are kNoBlock: the sliding window has passed
    };
    std::vector<Group> groups;
    int num_committed = 0;  // full blocks that have entered the prefix index, or were found in it
};

// Keys of the first tokens.size() / block_size blocks. Appends what `keys` lacks.
void extend_keys(std::vector<BlockKey>& keys, const Hash& root, std::span<const TokenId> tokens, int block_size);

// What the prefix index knows of a prompt, in blocks.
struct PrefixMatch {
    int length;     // of the longest prefix that can be used
    int num_known;  // before the prompt leaves what others have computed
};

// A whole block that a step copies, layer by layer.
struct BlockCopy {
    BlockId borrowed, local;
};

// A whole block that a step takes from one extent to another, through the layer-stream cache.
struct BlockMove {
    BlockId from, to;
};

// A block that goes down to storage, and where its bytes lie: in our pool, or in that of the lender of a link.
struct StoredBlock {
    BlockKey key;
    int group;
    int link;  // kNone: ours
    int64_t offset_bytes;
};

// A block that comes up from storage: for which of a prompt's keys, and where its bytes are wanted in the pool.
struct LoadingBlock {
    int index;
    int group;
    BlockId block;
    int64_t offset_bytes;
};

// A block that the prefix index knows and whose bytes are there.
struct ResidentBlock {
    BlockKey key;
    int group;
    Place place;
};

// The back of a prefix, which storage loads from its last block on. `here` is the first block from which on all that
// the prefix needs is here, `coming` the first from which on all of it is here or loading; the length of the prefix if
// its last block is not.
struct Back {
    int here, coming;
};

// A block that was loading.
struct LoadedBlock {
    int group;
    BlockId block;
};

// A whole local block that a step copies to another place in the pool, before anything else.
struct LocalMove {
    int group;
    BlockId from, to;
};

// Blocks that tables would let go of, in the local pool and below it.
struct Gain {
    int local = 0, staged = 0;
};

// The blocks that stay available when others are taken: so many in every group, and more in full-attention groups.
struct Spare {
    int each = 0, full = 0;
    int of(const GroupSpec& spec) const { return each + (spec.window == 0 ? full : 0); }
};

// The blocks that are about to be taken, per group.
struct Portions {
    std::vector<int> local, staged;  // taken in the pool, and further down
    std::vector<int> wanted;         // `local`, and the local blocks that must stay available beside them
};

class KvCache {
  public:
    // `extents_for_windows`: how many of the extents that groups share never stage borrowed blocks.
    KvCache(std::vector<GroupSpec> groups, int block_size, const std::vector<Link>& lend_links,
            const std::vector<Link>& borrow_links, int extents_for_windows = 0);

    int num_groups() const { return static_cast<int>(groups_.size()); }
    const GroupSpec& spec(int group) const { return groups_[group].spec; }
    int block_size() const { return block_size_; }
    bool has_windows() const { return has_windows_; }
    bool has_full_attention() const { return has_full_attention_; }
    bool shares_extents() const { return house_ != nullptr; }
    bool can_borrow() const { return !borrow_links_.empty(); }
    BlockTable make_table() const { return {std::vector<BlockTable::Group>(groups_.size()), 0}; }

    // Gives an empty table the longest usable cached prefix of `keys`. A prefix is usable if every full-attention group
    // has all its blocks, and every sliding-window group its tail.
    PrefixMatch acquire_prefix(BlockTable& table, std::span<const BlockKey> keys);
    // Gives an empty table the longest prefix that can be used and lies in the local pool, its bytes there; returns how
    // many blocks that are.
    int acquire_local_prefix(BlockTable& table, std::span<const BlockKey> keys);
    // Whether the prefix index knows every block of a table.
    bool is_indexed(const BlockTable& table) const;
    // How many of the first keys the index knows, whether or not they are of use; `before`: how many it was before.
    int count_known(std::span<const BlockKey> keys, int before) const;
    // The keys that the index has got to know since the last call; some may be gone again, and of thousands the first.
    std::vector<BlockKey> take_news() { return index_.take_news(); }
    // Whether any block is loading.
    bool has_loading() const;
    // Whether such a prefix has blocks that are loading: a request that wants it waits until they are there.
    bool is_loading(std::span<const BlockKey> keys) const;
    // Returns the ascending numbers of a table's blocks that are borrowed in some group.
    std::vector<int32_t> borrowed_blocks(const BlockTable& table) const;
    // Adds blocks so that tokens up to `chunk_end` can be written, in full-attention groups up to `prompt_end`, and
    // leaves `spare` blocks available; or changes nothing and returns false. Takes local blocks before borrowed ones,
    // and moves cached blocks out of their way.
    bool extend(BlockTable& table, int chunk_end, int prompt_end, Spare spare);
    // The end of the longest chunk, of one that ends at `chunk_end`, for which extend() finds room in the
    // sliding-window groups, and in groups that share extents with them.
    int window_room_end(const BlockTable& table, int chunk_end, int prompt_end, Spare spare) const;
    // Lets extend() find the room that it lacks where groups share extents, if that is only because a few used blocks
    // keep extents from changing hands: these blocks move to where others of their group are free or cached. False:
    // that does not help. `tables`: of all requests that hold blocks.
    bool compact(const BlockTable& table, int chunk_end, int prompt_end, int spare,
                 std::span<BlockTable* const> tables);
    // The tokens that a table's blocks have room for in every group.
    int capacity(const BlockTable& table) const;
    // Whether free local blocks suffice for `num_tokens` tokens of a table, and `spare` more are left in every group.
    bool has_free(const BlockTable& table, int num_tokens, int spare) const;
    // The first group in which extend() finds no room; kNone: it finds room in all of them.
    int short_group(const BlockTable& table, int chunk_end, int prompt_end, Spare spare) const;
    // How many of `tables`, from the first, must let go of their blocks before extend() finds room, where each of them
    // that does so lessens `spare` by one; kNone: all of them do not suffice. Blocks may have to move; see compact().
    int releases_needed(const BlockTable& table, int chunk_end, int prompt_end, int spare,
                        std::span<const BlockTable* const> tables) const;
    // Whether extend() would find the room that it lacks if nothing were loading. Blocks may have to move; see
    // compact().
    bool is_short_of_loads(const BlockTable& table, int chunk_end, int prompt_end) const;
    // Grows whenever extend() may find room in a group, or acquire_prefix() find more so that less is needed there,
    // where it did not before; other than by a commit of the very blocks that are looked for. kNone: in any group.
    int64_t room_version(int group) const;
    // Moves up to `max_blocks` borrowed blocks that only this table holds to local ones, as far as that leaves `spare`
    // local blocks available: what stays borrowed is streamed for every token.
    void promote(BlockTable& table, int spare, int max_blocks);
    // The bytes of the table's first `num_blocks` full blocks, which are those of `tokens` in the namespace of `root`,
    // are written: they enter the prefix index. Where it already has equal bytes the table changes to them.
    void commit(BlockTable& table, std::span<const BlockKey> keys, int num_blocks, std::span<const TokenId> tokens,
                const BlockKey& root);
    // Keeps the tails of the first `length` keys' end in the sliding-window groups before others, if they are there.
    void keep_boundary(std::span<const BlockKey> keys, int length, Worth worth);
    // Takes a free local block of each group for a key that the prefix index does not know, and whose bytes are on
    // their way; or returns none.
    std::vector<BlockId> begin_loading(const BlockKey& key);
    // The bytes have come, or never will. Throws std::invalid_argument unless these blocks are loading.
    void end_loading(std::span<const BlockId> blocks, bool is_loaded);
    // Lets go of what lies below the tail of the last full block's end, and one block more: a prompt that ends with
    // that block can use no longer prefix than the one before it.
    void release_outside_window(BlockTable& table, int num_computed);
    // Lets go of the blocks behind the first `num_tokens` tokens: what was written there does not count.
    void trim(BlockTable& table, int num_tokens);
    void release(BlockTable& table);
    // Undoes acquire_prefix() for a request that finds no room: its blocks do not count as used now.
    void put_back(BlockTable& table);
    // release() while steps may still use the blocks: nothing else happens to them before these settle.
    void retire(BlockTable& table);
    // A step is being planned. Steps settle in the order in which they were planned; one that has copies settles before
    // the next is planned. The last one may be given up while it is being planned, if it has no copies.
    void begin_step();
    void cancel_step();
    // The oldest step is over: its copies are done.
    void settle();
    // The only step is over and its copies may have failed: what they wrote is forgotten. No table may hold blocks.
    void settle_failed();
    // Frees every cached block, and forgets what is loading.
    void reset();

    // Whether one sequence could have so many blocks, num_blocks(group) of each group, now if it were alone.
    template <class NumBlocks>
    bool could_hold(NumBlocks&& num_blocks) const {
        std::vector<int> counts;
        for (int g = 0; g < num_groups(); ++g) counts.push_back(num_blocks(g));
        if (house_) return could_hold_in_house(counts);
        for (int g = 0; g < num_groups(); ++g)
            if (counts[g] > most_of_one_sequence(g)) return false;
        return true;
    }
    // The group's local blocks that are not lent; where groups share extents, those that it could have.
    int num_home_blocks(int group) const;
    // Returns how many of the extents that groups share are not lent.
    int num_home_extents() const { return num_home_blocks(0) / groups_[0].spec.blocks_per_extent; }
    // These make the layer-stream cache follow what is borrowed (paper Eqs. 4 and 5), one whole block at a time, as far
    // as the borrowed blocks in use and the room in the pool allow. It does not grow while extents drain: they need the
    // same room.
    void shrink_staging();
    void grow_staging();
    bool must_resize_staging() const;
    int num_staging_layer_blocks(int group) const;
    int32_t staging_layer_block(int group, int index) const;  // layer-block index

    // ---- lending and borrowing ----
    // Those that name a link or extents throw std::invalid_argument, with nothing changed, where there is no such link
    // or extent, an extent is named twice, or it is not in the state that the call is for.
    std::vector<int> lend(int lend_link, int max_extents, bool or_cached);
    void take_back(int lend_link, std::span<const int32_t> extents);
    void borrow(int borrow_link, std::span<const int32_t> extents);
    void recall(int borrow_link, std::span<const int32_t> extents);
    void lose(int borrow_link);
    std::vector<int> take_returned(int borrow_link);
    bool is_draining() const;
    // Moves what recalled extents hold to local blocks, used ones also to extents that stay, and forgets cached blocks
    // for which there is no room; false, with nothing moved, if there is no room for used ones. `tables`: of all
    // requests that hold blocks.
    bool drain(std::span<BlockTable* const> tables);
    // Drops moves between extents whose holders have stopped while the step was planned: they are not worth a place in
    // the layer-stream cache.
    void forget_idle_moves();
    // Whether a block lies in a lost extent, or should have come from there.
    bool is_lost(int group, BlockId block) const;
    bool holds_lost(const BlockTable& table) const;
    // Returns the blocks, with their groups, of a table's first `num_blocks` entries whose bytes the last step planned
    // gets from peers.
    std::vector<std::pair<int, BlockId>> arrivals(const BlockTable& table, int num_blocks) const;
    BlockPool::Location locate(int group, BlockId borrowed) const;

    // ---- storage ----
    void set_write_policy(WritePolicy policy);
    // Returns up to so many blocks that are to be written to storage.
    std::vector<StoredBlock> take_offers(int max_blocks);
    // Offers the blocks of a prefix that are here, without waiting as the policy does.
    void offer_prefix(std::span<const BlockKey> keys);
    const Offers& offers() const { return offers_; }
    // Whether each key has a block here: [keys][groups].
    std::vector<uint8_t> residency(std::span<const BlockKey> keys) const;
    // The length of the longest prefix that could be used, in blocks, if these blocks were there: [keys][groups].
    int usable_length(std::span<const uint8_t> is_there) const;
    // How many of the first keys' full-attention blocks the local pool has room for, were nothing else there: the most
    // that can be loaded.
    int local_room(std::span<const BlockKey> keys) const;
    // Takes blocks for all that the prefix `keys` needs from block `first` on and that is not here, and leaves `spare`
    // blocks available; or changes nothing and returns none. Forgets cached blocks for them if it may, but none of the
    // prefixes `kept`.
    std::vector<LoadingBlock> begin_load(std::span<const BlockKey> keys, int first, Spare spare, bool may_evict,
                                         std::span<const std::span<const BlockKey>> kept);
    // The back of the prefix `keys` behind its first `num_before` blocks, of which only local blocks count: in
    // sliding-window groups the tail of its end.
    Back find_back(std::span<const BlockKey> keys, int num_before) const;
    // The bytes of what a prefix of `length` blocks needs of blocks `begin` to `end`.
    int64_t needed_bytes(int begin, int end, int length) const;
    // Replaces the blocks of a table that it has not committed by those of `keys`, of which all that the prefix needs
    // are here, and keeps the boundary at their end.
    void take_back(BlockTable& table, std::span<const BlockKey> keys);
    // Throws std::invalid_argument unless these blocks are loading, each named once.
    void check_loading(std::span<const LoadedBlock> blocks) const;
    // Nobody waits for these blocks any more; their bytes may still be on their way.
    void forget_loading(std::span<const LoadedBlock> blocks);
    // The bytes of blocks that were loading have come, or never will.
    void end_load(std::span<const LoadedBlock> blocks, bool is_loaded);

    // The seconds since a block was evicted; none if it was not, or longer ago than is remembered.
    std::optional<double> evicted_age_s(const BlockKey& key) const { return evictions_.age_s(key); }

    // ---- events ----
    KvEventLog& events() { return events_; }
    // Remembers the tokens of blocks that are loading, for the event that tells of them.
    void describe_loading(std::span<const LoadingBlock> loading, std::span<const TokenId> tokens, const BlockKey& root,
                          std::span<const BlockKey> keys);
    std::vector<ResidentBlock> resident_blocks() const;

    // Copies that the last step planned makes before anything else, layer by layer.
    const std::vector<BlockCopy>& spills(int group) const { return groups_[group].spills; }
    const std::vector<BlockCopy>& moves_in(int group) const { return groups_[group].moves_in; }
    const std::vector<BlockMove>& moves_across(int group) const { return groups_[group].moves_across; }
    bool has_copies() const;
    // Moves within the pool that the last step planned makes before anything else, in this order.
    const std::vector<LocalMove>& local_moves() const { return local_moves_; }

    std::vector<GroupStats> stats() const;
    const BlockPool& pool(int group) const { return groups_[group].pool; }
    // `tables` and `keys` of all requests that hold blocks. Throws std::runtime_error on any disagreement.
    void check(std::span<const BlockTable* const> tables, std::span<const std::vector<BlockKey>* const> keys) const;

  private:
    struct LinkOfGroup {
        int group;
        int index;  // among the links of that group
    };
    struct Group {
        GroupSpec spec;
        int num_tail;  // of a window group: blocks that must be resident before a match's end
        BlockPool pool;
        std::vector<int> borrow_links;             // the engine's numbers of the pool's links
        std::vector<BlockId> staging = {};         // the blocks of the layer-stream cache
        int num_fresh = 0;                         // the last of them, which this step still copies from
        int64_t num_unfreshed = 0;                 // how many ever ceased to be fresh
        std::vector<BlockCopy> spills = {};        // local to borrowed
        std::vector<BlockCopy> moves_in = {};      // borrowed to local
        std::vector<BlockMove> moves_across = {};  // borrowed to borrowed
        std::vector<BlockId> missing = {};         // targets of moves whose source was lost meanwhile
    };
    static const LinkOfGroup& find_link(const std::vector<LinkOfGroup>& links, int link, const char* kind);
    // `is_there(group, block)` says whether a block that the index has may be used.
    template <class IsThere>
    PrefixMatch match(std::span<const BlockKey> keys, std::vector<NodeId>& path, IsThere&& is_there) const;
    PrefixMatch match(std::span<const BlockKey> keys, std::vector<NodeId>& path) const;
    void hold_match(BlockTable& table, int length);
    bool find_path(std::span<const BlockKey> keys);
    void set_worths(std::span<const NodeId> nodes);
    Gain gain_of(int group, const BlockTable& table, std::unordered_map<BlockId, int>& num_gone) const;
    bool has_room_with(std::span<const Gain> gains, const BlockTable& table, int chunk_end, int prompt_end,
                       int spare) const;
    bool is_short(int group, int needed, int spare, Gain gain) const;
    int available(int group, Gain gain = {}) const;
    // ---- a house: extents that groups share; in kv_cache_house.cpp ----
    std::vector<int> missing_blocks(const BlockTable& table, int chunk_end, int prompt_end) const;
    std::vector<int> wanted_blocks(const BlockTable& table, int chunk_end, int prompt_end, Spare spare) const;
    int wanted_of(int group, int needed, int spare, int staged, Gain gain) const;
    Portions portions(std::span<const int> needed, Spare spare) const;
    void extend_in_house(BlockTable& table, std::span<const int> needed, Spare spare);
    int missing_extents(std::span<const int> wanted) const;
    int spare_extents(std::span<const int> wanted, bool is_compacted) const;
    bool has_free_extents(std::span<const int> wanted) const;
    int cheapest_donor(int group, std::span<const int> wanted) const;
    bool goes_before(int group, BlockId cached, int other_group, BlockId other) const;
    void enter_missing(std::span<const int> needed, std::span<const int> wanted);
    BlockId find_free(int group, std::span<const int> wanted);
    void enter_if_full(int group);
    void free_one(int group, std::span<const int> wanted);
    bool make_room_in_house(int group);
    bool may_promote(int group, int spare) const;
    template <class MayGoOn>
    void promote_while(BlockTable& table, int group, int& max_blocks, MayGoOn&& may_go_on);
    int staging_extents_of(int group) const;
    int extents_of_one_sequence(int group, int num_blocks) const;
    int spare_for_histories(std::span<const int> wanted, bool is_compacted) const;
    int num_left_for_histories() const;
    bool borrows() const;
    bool could_hold_in_house(std::span<const int> num_blocks) const;
    bool may_grow(int group) const;
    int num_extents_to_take(int group) const;
    bool may_take_from(int group, int other) const;
    bool can_stage_more(int group) const;
    void make_room_for_windows();
    bool stage_block(int group);
    bool stage_extent(int group);
    ExtentId empty_for_staging(int group);
    void empty_oldest(int group);
    void empty(int group, ExtentId extent);
    std::pair<int, ExtentId> extent_to_compact(std::span<const int> wanted) const;
    void move_out(int group, ExtentId extent, std::span<BlockTable* const> tables);
    struct Cached {
        int group;
        BlockId block;
    };
    std::optional<Cached> last_to_go(ExtentId first, int num_extents) const;
    std::vector<int> lendable_of_house(int lend_link, int max_extents, bool or_cached) const;
    void claim(int group, BlockId first, int num_blocks);
    int missing(const BlockTable& table, int group, int chunk_end, int prompt_end) const;
    int first_of_match(int group, int length) const;
    int available_staged(int group, Gain gain) const;
    int num_unstaged(int group) const;  // blocks that could be staged beside those in use; below 0: as many cannot
    int overdraft(int group, Gain gain = {}) const;
    int staging_target(int group) const;
    int most_of_one_sequence(int group) const;
    // All of these return kNone, or false, with nothing changed, if there is no room.
    bool make_local_room(int group);
    BlockId take_local(int group);
    BlockId take_below(int group, Place place);
    bool is_wanted_below(int group, BlockId cached) const;
    void demote(int group, BlockId cached);
    bool is_moving_across(int group, BlockId block) const;
    BlockId move_in(int group, BlockId borrowed);
    BlockId move_across(int group, BlockId borrowed);
    // The blocks of a state in extents that are leaving.
    std::vector<BlockId> leaving(int group, BlockState state) const;
    std::optional<Portions> portions_of_drain(std::span<const std::vector<BlockId>> used) const;
    void drain_cached(int group, const std::vector<BlockId>& leaving, int num_local);
    void drain_used(int group, const std::vector<BlockId>& used, int num_across, std::span<BlockTable* const> tables);
    void evict(int group, BlockId block) noexcept;
    void lose_link(LinkOfGroup lost) noexcept;
    void let_go(int group, BlockId block);
    void adopt(int group, int32_t& entry, NodeId node, const BlockText& text);
    // The one place where the block of a node changes.
    void point_to(NodeId node, int group, BlockId block, const BlockText& text = {}) {
        if (events_.is_on()) tell(node, group, block, text);
        index_.set_block(node, group, block);
    }
    void tell(NodeId node, int group, BlockId next, const BlockText& text);
    BlockText text_of(std::span<const TokenId> tokens, const BlockKey& root, std::span<const BlockKey> keys,
                      int index) const;
    void tell_loaded(int group, BlockId block, bool is_loaded);
    void offer_committed(NodeId node, const BlockKey& key);
    void offer_tail(std::span<const NodeId> nodes, std::span<const BlockKey> keys);
    void offer_hit(std::span<const NodeId> path, std::span<const BlockKey> keys, int length);
    void offer_match(std::span<const NodeId> path, std::span<const BlockKey> keys, int length);
    void offer_all();
    void offer_next_to_go(int max_blocks);
    int num_near_eviction(int group) const;
    void offer_what_goes_with(int group, NodeId node);
    bool offer(int group, NodeId node);
    bool is_worth_storing(int group, BlockId block) const;
    bool is_lost_unstored(int group, NodeId node) const;
    bool can_store(int group, BlockId block) const;
    StoredBlock stored_block(const BlockKey& key, int group, BlockId block) const;
    std::vector<LoadingBlock> hold_present(std::span<const BlockKey> keys, std::vector<std::pair<int, BlockId>>& held);
    bool has_room_to_load(std::span<const int> wanted, bool may_evict) const;
    void load_into(LoadingBlock& load, const BlockKey& key, std::vector<int>& wanted);
    int64_t local_offset_bytes(int group, BlockId local) const;
    bool is_local(int group, BlockId block) const { return traits(groups_[group].pool.place(block)).is_attended; }
    BlockId block_of(int group, int32_t entry) const {
        return is_staged(entry) ? staged_place(entry) : entry / groups_[group].spec.num_layers;
    }
    int32_t entry_of(int group, BlockId block) const {
        return is_local(group, block) ? block * groups_[group].spec.num_layers : staged(block);
    }
    void check_table(const BlockTable& table, const std::vector<BlockKey>& keys) const;
    void check_boundaries() const;

    int block_size_;
    int extents_for_windows_;
    std::unique_ptr<House> house_;  // null: every group has its blocks to itself
    std::vector<Group> groups_;
    std::vector<LocalMove> local_moves_;
    std::vector<LinkOfGroup> lend_links_, borrow_links_;
    bool has_full_attention_ = false, has_windows_ = false;
    int64_t num_window_losses_ = 0;  // matches that may have become shorter, and need fewer blocks of a window
    PrefixIndex index_;
    Boundaries boundaries_;
    Offers offers_;
    KvEventLog events_;
    Evictions evictions_;
    int num_steps_ = 0;         // begun and not settled
    std::vector<NodeId> path_;  // scratch of acquire_prefix
};

}  // namespace swiftkv
