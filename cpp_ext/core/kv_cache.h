// The KV blocks of one engine: a pool per KV group, the prefix index over them, and the tables of the running requests.
// The file has more than 400 lines because it is one class: all of its parts see every block that one of them moves.
// Its functions are in these files:
//   kv_cache.cpp           matches prompts, takes and moves blocks, commits them, and loads blocks from lower places
//   kv_cache_room.cpp      counts the room for blocks
//   kv_cache_house.cpp     hands extents that groups share from one group to another
//   kv_cache_staging.cpp   sizes the layer-stream cache
//   kv_cache_lending.cpp   lends, borrows, and empties recalled extents
//   kv_cache_release.cpp   lets go of blocks; begins and settles steps
//   kv_cache_keep.cpp      keeps boundaries, and evicts blocks
//   kv_cache_storage.cpp   offers blocks to storage, and loads blocks from there
//   kv_cache_events.cpp    reports changes of the prefix index
//   invariants.cpp         checks all of it
#pragma once

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "boundaries.h"
#include "division.h"
#include "evictions.h"
#include "kv_events.h"
#include "kv_group.h"
#include "offers.h"
#include "prefix_index.h"
#include "types.h"

namespace swiftkv {

// The blocks of one request. The entry of a block that is attended where it lies, in the pool or in host memory, is its
// first layer block, as kernels read it. The entry of a borrowed block is staged(block); the plan of a step replaces it
// by staged(layer block).
struct BlockTable {
    struct Group {
        std::vector<int32_t> entries;
        int first = 0;  // entries before this one are kNoBlock: the sliding window has passed
    };
    std::vector<Group> groups;
    int num_committed = 0;  // full blocks that have entered the prefix index, or were found in it
};

// Appends to `keys` the missing keys of the first tokens.size() / block_size blocks.
void extend_keys(std::vector<BlockKey>& keys, const Hash& root, std::span<const TokenId> tokens, int block_size);

// The part of a prompt that the prefix index knows, in blocks.
struct PrefixMatch {
    int length;     // the longest prefix that can be used
    int num_known;  // the prefix up to the last block with a node in the index, whether it can be used or not
};

// A block that goes down to storage. Its bytes lie in our pool, in host memory behind it, or in the pool of a link's
// lender.
struct StoredBlock {
    BlockKey key;
    int group;
    int link;  // kNone: our pool, or host memory
    int64_t offset_bytes;
};

// A block that comes up from storage, and the local block for its bytes; or the block in host memory that it is.
struct LoadingBlock {
    int index;  // the index of its key among the prompt's keys
    int group;
    int chunk;  // the pinned chunk that it is, or from which the next step copies it; kNone: storage reads it
    BlockId block;
    int64_t offset_bytes;  // from the beginning of the pool
};

// The chunks of host memory that are pinned for a prompt: [keys][groups], kNone where there is none; or nothing at all.
using PinnedChunks = std::span<const int32_t>;

// A block that the prefix index knows and whose bytes are there.
struct ResidentBlock {
    BlockKey key;
    int group;
    Place place;
};

// The state of the back of a prefix, which storage loads from the last block to the first. From block `here` on, every
// block that the prefix needs is here. From block `coming` on, every such block is here or loading. If not even the
// last block is, the number is the length of the prefix.
struct Back {
    int here, coming;
};

// A block that was loading.
struct LoadedBlock {
    int group;
    BlockId block;
};

// A whole local block that a step copies to another local block, before anything else.
struct LocalMove {
    int group;
    BlockId from, to;
};

// The number of blocks that tables would let go of, in the local pool and below it.
struct Gain {
    int local = 0, staged = 0;
};

// The number of blocks that must stay available when others are taken: `each` in every group, and `full` more in
// full-attention groups.
struct Spare {
    int each = 0, full = 0;
    int of(const GroupSpec& spec) const { return each + (spec.window == 0 ? full : 0); }
};

// The number of blocks that are about to be taken, per group.
struct Portions {
    std::vector<int> local, staged;  // taken in the pool, and from peers
    std::vector<int> wanted;         // `local`, and the local blocks that must stay available beside them
};

class KvCache {
  public:
    // `extents_for_windows`: the number of shared extents that never stage borrowed blocks.
    KvCache(std::vector<GroupSpec> groups, int block_size, const std::vector<Link>& lend_links,
            const std::vector<Link>& borrow_links, int extents_for_windows = 0);
    KvCache(const KvCache&) = delete;
    KvCache& operator=(const KvCache&) = delete;

    int num_groups() const { return static_cast<int>(groups_.size()); }
    const GroupSpec& spec(int group) const { return groups_[group].spec; }
    int block_size() const { return block_size_; }
    bool has_windows() const { return has_windows_; }
    bool has_full_attention() const { return has_full_attention_; }
    bool shares_extents() const { return division_.is_shared(); }
    bool can_borrow() const { return !borrow_links_.empty(); }
    bool can_attend_host() const { return can_attend_host_; }
    bool can_copy() const { return can_borrow() || can_move_up_; }
    // The number by which plans name host memory: it follows those of the borrow links.
    int host_link() const { return static_cast<int>(borrow_links_.size()); }
    BlockTable make_table() const { return {std::vector<BlockTable::Group>(groups_.size()), 0}; }

    // Gives an empty table the longest usable cached prefix of `keys`. A prefix is usable if every full-attention group
    // has all its blocks, and every sliding-window group its tail.
    PrefixMatch acquire_prefix(BlockTable& table, std::span<const BlockKey> keys);
    // Gives an empty table the longest usable prefix whose blocks are attended where they lie and are not loading.
    // Returns its length in blocks.
    int acquire_attended_prefix(BlockTable& table, std::span<const BlockKey> keys);
    // Whether the prefix index knows every block of a table.
    bool is_indexed(const BlockTable& table) const;
    // The number of leading keys that the index knows, usable or not. `before`: the number that it knew at the last
    // call.
    int count_known(std::span<const BlockKey> keys, int before) const;
    // Returns the keys that entered the index since the last call: at most the first few thousand. Some may have left
    // it again.
    std::vector<BlockKey> take_news() { return index_.take_news(); }
    // Whether any block is loading.
    bool has_loading() const;
    // Whether the longest usable prefix of `keys` has blocks that are loading. A request that wants it waits for them.
    bool is_loading(std::span<const BlockKey> keys) const;
    // Returns the indices of a table's blocks that lie in that place in some group, in ascending order.
    std::vector<int32_t> blocks_in(Place place, const BlockTable& table) const;
    // Adds blocks so that tokens up to `chunk_end` can be written (in full-attention groups up to `prompt_end`) and
    // `spare` blocks stay available. Takes local blocks before borrowed ones, and moves cached blocks out of their way.
    // Returns false, with nothing changed, if there is no room.
    bool extend(BlockTable& table, int chunk_end, int prompt_end, Spare spare);
    // Returns the largest end up to `chunk_end` for which extend() finds room in the sliding-window groups, and in
    // groups that share extents with them.
    int window_room_end(const BlockTable& table, int chunk_end, int prompt_end, Spare spare) const;
    // Makes the room that extend() lacks, if groups share extents and a few used blocks keep extents from changing
    // hands: these blocks move to free or cached blocks of their group. Returns false if that does not help. `tables`:
    // the tables of all requests that hold blocks.
    bool compact(const BlockTable& table, int chunk_end, int prompt_end, int spare,
                 std::span<BlockTable* const> tables);
    // The number of tokens for which a table's blocks have room in every group.
    int capacity(const BlockTable& table) const;
    // Whether free local blocks suffice for `num_tokens` tokens of a table, and `spare` more are left in every group.
    bool has_free(const BlockTable& table, int num_tokens, int spare) const;
    // Returns the first group in which extend() finds no room; kNone if it finds room in all of them.
    int short_group(const BlockTable& table, int chunk_end, int prompt_end, Spare spare) const;
    // Returns the number of `tables`, from the first on, that must let go of their blocks before extend() finds room;
    // kNone if all of them do not suffice. Each that lets go lessens `spare` by one. Blocks may have to move: see
    // compact().
    int releases_needed(const BlockTable& table, int chunk_end, int prompt_end, int spare,
                        std::span<const BlockTable* const> tables);
    // Whether extend() would find the room that it lacks if nothing were loading. Blocks may have to move; see
    // compact().
    bool is_short_of_loads(const BlockTable& table, int chunk_end, int prompt_end) const;
    // A counter that grows whenever extend() may find room in the group after it found none, or acquire_prefix() a
    // longer prefix, so that less room is needed. It ignores commits of the very blocks that a request looks for: see
    // Refusal::note_commit(). kNone: any group.
    int64_t room_version(int group) const;
    // The least growth of room_version(group) after which extend() may find room in a group if `leaving` let go of
    // their blocks; 0 if it may find room at once. One block less to spare counts as a growth by 1.
    int least_growth(int group, const BlockTable& table, int chunk_end, int prompt_end, int spare,
                     std::span<const BlockTable* const> leaving) const;
    // Moves up to `max_blocks` borrowed blocks that only this table holds to local ones, as long as `spare` local
    // blocks stay available. Blocks that stay borrowed are streamed for every token.
    void promote(BlockTable& table, int spare, int max_blocks);
    // Enters the table's first `num_blocks` full blocks in the prefix index; their bytes are written. They hold
    // `tokens` in the namespace of `root`. If the index already has an equal block, the table takes that one instead.
    void commit(BlockTable& table, std::span<const BlockKey> keys, int num_blocks, std::span<const TokenId> tokens,
                const BlockKey& root);
    // Keeps the boundary after the first `length` keys: in the sliding-window groups its tails, if they are here, are
    // evicted after blocks that are worth less.
    void keep_boundary(std::span<const BlockKey> keys, int length, Worth worth);
    // Takes a free local block of each group for a key that the prefix index does not know and whose bytes are on
    // their way. Returns an empty list if it knows the key or there is no room.
    std::vector<BlockId> begin_loading(const BlockKey& key);
    // Notes that the bytes have come, or never will. Throws std::invalid_argument unless these blocks are loading.
    void end_loading(std::span<const BlockId> blocks, bool is_loaded);
    // Lets go of the blocks that the sliding windows have passed. Keeps the tail of the last full block's end, and one
    // block more: a prompt that ends with that full block can only use the prefix that is one block shorter.
    void release_outside_window(BlockTable& table, int num_computed);
    // Lets go of the blocks after the first `num_tokens` tokens. Their contents are discarded.
    void trim(BlockTable& table, int num_tokens);
    void release(BlockTable& table);
    // Undoes acquire_prefix() for a request that finds no room. Unless groups share extents, its blocks get back their
    // positions in the order of eviction.
    void put_back(BlockTable& table);
    // Releases a table while steps may still use its blocks, which stay as they are until these steps settle.
    void retire(BlockTable& table);
    // Begins to plan a step. Steps settle in the order in which they were planned; a step with copies settles before
    // the next is planned. cancel_step() gives up the last one while it is being planned, if it has no copies.
    void begin_step();
    void cancel_step();
    // Ends the oldest step, whose copies are done.
    void settle();
    // Ends the only step, whose copies may have failed: what they wrote is forgotten. No table may hold blocks.
    void settle_failed();
    // Frees every cached block, and takes loading blocks out of the prefix index.
    void reset();

    // Whether one sequence could now have num_blocks(group) blocks of each group if it were alone.
    template <class NumBlocks>
    bool could_hold(NumBlocks&& num_blocks) const {
        std::vector<int> local;
        for (int g = 0; g < num_groups(); ++g) local.push_back(std::max(0, num_blocks(g) - most_streamed(g)));
        return division_.fits_alone(local);
    }
    // The number of the group's local blocks that are not lent; if groups share extents, the number that it could have.
    int num_home_blocks(int group) const { return division_.num_home_blocks(group); }
    // Resize the layer-stream cache to the blocks that are borrowed (paper Eqs. 4 and 5), one whole block at a time, as
    // far as the borrowed blocks in use and the room in the pool allow. It does not grow while extents drain, because
    // draining needs the same room.
    void shrink_staging();
    void grow_staging();
    bool must_resize_staging() const;
    int num_staging_layer_blocks(int group) const;
    int32_t staging_layer_block(int group, int index) const;  // layer-block index

    // ---- lending and borrowing ----
    // Functions that take a link or extents throw std::invalid_argument, with nothing changed, if the link or an extent
    // does not exist, an extent is named twice, or it is not in the state that the call is for.
    std::vector<int> lend(int lend_link, int max_extents, bool or_cached);
    void take_back(int lend_link, std::span<const int32_t> extents);
    void borrow(int borrow_link, std::span<const int32_t> extents);
    void recall(int borrow_link, std::span<const int32_t> extents);
    void lose(int borrow_link);
    std::vector<int> take_returned(int borrow_link);
    bool is_draining() const;
    // Moves the blocks in recalled extents to local blocks, or, if they are used, to extents that stay. Forgets cached
    // blocks for which there is no room. Returns false, with nothing moved, if there is no room for the used ones.
    // `tables`: the tables of all requests that hold blocks.
    bool drain(std::span<BlockTable* const> tables);
    // Drops the moves between extents whose blocks have lost their holders while the step was planned. Such a block is
    // not worth a layer block of the layer-stream cache.
    void forget_idle_moves();
    // Whether a block lies in a lost extent, or was to be copied from one.
    bool is_lost(int group, BlockId block) const;
    bool holds_lost(const BlockTable& table) const;
    // Returns the blocks among a table's first `num_blocks` whose bytes come from peers in the step planned last, as
    // (group, block).
    std::vector<std::pair<int, BlockId>> arrivals(const BlockTable& table, int num_blocks) const;
    BlockPool::Location locate(int group, BlockId borrowed) const;

    // ---- storage ----
    void set_write_policy(WritePolicy policy);
    // Returns up to `max_blocks` blocks that are to be written to storage.
    std::vector<StoredBlock> take_offers(int max_blocks);
    // Offers the blocks of a prefix that are here now, whatever the policy waits for.
    void offer_prefix(std::span<const BlockKey> keys);
    const Offers& offers() const { return offers_; }
    // Whether each key has a block here: [keys][groups].
    std::vector<uint8_t> residency(std::span<const BlockKey> keys) const;
    // The length, in blocks, of the longest prefix that could be used if these blocks were here: [keys][groups].
    int usable_length(std::span<const uint8_t> is_there) const;
    // The most leading keys whose blocks can be in the local pool at once if it holds nothing else. Blocks that lie in
    // a lower place stay there, and need no room; nor do blocks whose chunks are pinned.
    int local_room(std::span<const BlockKey> keys, PinnedChunks pinned) const;
    // Takes a block for each block that the prefix `keys` needs from block `first` on and that is not here: its pinned
    // chunk if the group is attended there, or else a free local block, such that `spare` blocks stay available. Evicts
    // cached blocks for them, except those of the prefixes `kept`. Returns an empty list, with nothing changed, if
    // there is no room.
    std::vector<LoadingBlock> begin_load(std::span<const BlockKey> keys, int first, PinnedChunks pinned, Spare spare,
                                         std::span<const std::span<const BlockKey>> kept);
    // Has the step that is being planned copy the blocks that begin_load() has found in pinned chunks, and holds them
    // until it settles.
    void move_up();
    // Returns the chunks of host memory that the cache has ceased to use since the last call, once for each time that
    // it took one in begin_load().
    std::vector<int> take_unpinned();
    // Evicts all cached blocks that lie in host memory.
    void evict_host();
    // Returns the state of the prefix `keys` after its first `num_before` blocks. Only local blocks count as here. In
    // sliding-window groups, the prefix needs only the tail of its end.
    Back find_back(std::span<const BlockKey> keys, int num_before) const;
    // The bytes of the blocks from `begin` to `end`, counting only those that a prefix of `length` blocks needs.
    int64_t needed_bytes(int begin, int end, int length) const;
    // Replaces the uncommitted blocks of a table by the indexed blocks of `keys`, and keeps the boundary at their end.
    // All blocks that the prefix `keys` needs must be here.
    void take_back(BlockTable& table, std::span<const BlockKey> keys);
    // Throws std::invalid_argument unless these blocks are loading, each named once.
    void check_loading(std::span<const LoadedBlock> blocks) const;
    // Takes these blocks out of the prefix index, so that no request waits for them; their bytes may still arrive.
    void forget_loading(std::span<const LoadedBlock> blocks);
    // Notes that the bytes of these blocks have come, or never will.
    void end_load(std::span<const LoadedBlock> blocks, bool is_loaded);

    // The seconds since a block was evicted; nullopt if it was not, or longer ago than is remembered.
    std::optional<double> evicted_age_s(const BlockKey& key) const { return evictions_.age_s(key); }

    // ---- events ----
    KvEventLog& events() { return events_; }
    // Remembers the tokens of blocks that are loading, for the events that will report these blocks.
    void describe_loading(std::span<const LoadingBlock> loading, std::span<const TokenId> tokens, const BlockKey& root,
                          std::span<const BlockKey> keys);
    std::vector<ResidentBlock> resident_blocks() const;

    // The copies that the step planned last makes before anything else, layer by layer.
    const std::vector<BlockCopy>& spills(int group) const { return groups_[group].spills; }
    const std::vector<BlockCopy>& moves_in(int group) const { return groups_[group].moves_in; }
    const std::vector<BlockMove>& moves_across(int group) const { return groups_[group].moves_across; }
    const std::vector<ChunkCopy>& moves_up(int group) const { return groups_[group].moves_up; }
    bool has_moves_up() const;
    bool has_copies() const;
    // The moves within the pool that the step planned last makes before anything else, in this order.
    const std::vector<LocalMove>& local_moves() const { return local_moves_; }

    std::vector<GroupStats> stats() const;
    const BlockPool& pool(int group) const { return groups_[group].pool; }
    // Checks all invariants. `tables` and `keys`: of all requests that hold blocks. Throws std::runtime_error if one is
    // violated.
    void check(std::span<const BlockTable* const> tables, std::span<const std::vector<BlockKey>* const> keys) const;

  private:
    struct LinkOfGroup {
        int group;
        int index;  // among the links of that group
    };
    static const LinkOfGroup& find_link(const std::vector<LinkOfGroup>& links, int link, const char* kind);
    // `is_there(group, block)` returns whether a block that the index has may be used.
    template <class IsThere>
    PrefixMatch match(std::span<const BlockKey> keys, std::vector<NodeId>& path, IsThere&& is_there) const;
    PrefixMatch match(std::span<const BlockKey> keys, std::vector<NodeId>& path) const;
    void hold_match(BlockTable& table, int length);
    bool find_path(std::span<const BlockKey> keys);
    void set_worths(std::span<const NodeId> nodes);
    std::vector<Gain> most_gains(std::span<const BlockTable* const> tables) const;
    Gain gain_of(int group, const BlockTable& table);
    bool has_room_with(std::span<const Gain> gains, const BlockTable& table, int chunk_end, int prompt_end,
                       int spare) const;
    int lacking(int group, int needed, int spare, Gain gain) const;
    int available(int group) const;
    // ---- extents that groups share; in kv_cache_house.cpp ----
    std::vector<int> missing_blocks(const BlockTable& table, int chunk_end, int prompt_end) const;
    std::vector<int> wanted_blocks(const BlockTable& table, int chunk_end, int prompt_end, Spare spare) const;
    int wanted_of(int group, int needed, int spare, int staged, Gain gain) const;
    int fewest_wanted(int group, int needed, int spare, Gain gain) const;
    Portions portions(std::span<const int> needed, Spare spare) const;
    void extend_in_house(BlockTable& table, std::span<const int> needed, Spare spare);
    void enter_missing(std::span<const int> needed, std::span<const int> wanted);
    BlockId find_free(int group, std::span<const int> wanted);
    void enter_if_full(int group);
    void free_one(int group, std::span<const int> wanted);
    bool make_room_in_house(int group);
    template <class MayGoOn>
    void promote_while(BlockTable& table, int group, int& max_blocks, MayGoOn&& may_go_on);
    int most_streamed(int group) const;
    bool stage_more(int group);
    bool stage_block(int group);
    bool stage_extent(int group);
    ExtentId empty_for_staging(int group);
    void empty_oldest(int group);
    void empty(int group, ExtentId extent);
    void move_out(int group, ExtentId extent, std::span<BlockTable* const> tables);
    void claim(int group, BlockId first, int num_blocks);
    int missing(const BlockTable& table, int group, int chunk_end, int prompt_end) const;
    int first_of_match(int group, int length) const;
    int available_staged(int group, Gain gain) const;
    int num_unstaged(int group) const;  // how many more borrowed blocks can be staged; < 0: too many are in use
    int overdraft(int group, Gain gain = {}) const;
    // All of these return kNone, or false, with nothing changed, if there is no room.
    bool make_local_room(int group);
    BlockId take_local(int group);
    BlockId take_peer(int group);
    bool is_wanted_by_peers(int group, BlockId cached) const;
    void demote(int group, BlockId cached);
    bool is_moving_across(int group, BlockId block) const;
    BlockId move_in(int group, BlockId borrowed);
    BlockId move_across(int group, BlockId borrowed);
    // Returns the blocks of a state in recalled or lost extents.
    std::vector<BlockId> leaving(int group, BlockState state) const;
    std::optional<Portions> portions_of_drain(std::span<const std::vector<BlockId>> used) const;
    void drain_cached(int group, const std::vector<BlockId>& leaving, int num_local);
    void drain_used(int group, const std::vector<BlockId>& used, int num_across, std::span<BlockTable* const> tables);
    void evict(int group, BlockId block) noexcept;
    void lose_link(LinkOfGroup lost) noexcept;
    void let_go(int group, BlockId block);
    void adopt(int group, int32_t& entry, NodeId node, const BlockText& text);
    // Changes the block of a node. No other function does, except compaction within the pool.
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
    void offer_groups(NodeId node);
    void offer_next_to_go(int max_blocks);
    int num_near_eviction(int group) const;
    void offer_what_goes_with(int group, NodeId node);
    bool offer(int group, NodeId node);
    bool is_worth_storing(int group, BlockId block) const;
    bool is_lost_unstored(int group, NodeId node) const;
    bool can_store(int group, BlockId block) const;
    StoredBlock stored_block(const BlockKey& key, int group, BlockId block) const;
    std::vector<LoadingBlock> missing_from(std::span<const BlockKey> keys, int first, PinnedChunks pinned) const;
    int pinned_chunk(int group, size_t index, PinnedChunks pinned) const;
    BlockId attended_block(int group, int chunk) const;
    void hold_present(std::span<const BlockKey> keys, std::vector<std::pair<int, BlockId>>& held);
    bool is_known_to_lack_room(std::span<const int> wanted, std::span<const std::span<const BlockKey>> kept) const;
    int64_t num_moves() const;
    void load_into(LoadingBlock& load, const BlockKey& key, std::vector<int>& wanted);
    int64_t attended_offset_bytes(int group, BlockId attended) const;
    bool is_attended(int group, BlockId block) const { return groups_[group].pool.place(block) != Place::kPeer; }
    BlockId block_of(int group, int32_t entry) const {
        if (is_staged(entry)) return staged_place(entry);
        const KvGroup& held = groups_[group];
        const BlockId local = entry / held.spec.num_layers;
        if (local < held.pool.num_local()) return local;
        return held.pool.host_block((entry - held.spec.host.first) / held.spec.host.stride);
    }
    int32_t entry_of(int group, BlockId block) const {
        const KvGroup& held = groups_[group];
        switch (held.pool.place(block)) {
            case Place::kLocal:
                return block * held.spec.num_layers;
            case Place::kPeer:
                return staged(block);
            case Place::kHost:
                return held.spec.host.first + held.pool.chunk_of(block) * held.spec.host.stride;
        }
        __builtin_unreachable();
    }
    void check_table(const BlockTable& table, const std::vector<BlockKey>& keys) const;
    void check_boundaries() const;

    int block_size_;
    Division division_;
    std::vector<KvGroup> groups_;
    std::vector<LocalMove> local_moves_;
    std::vector<LinkOfGroup> lend_links_, borrow_links_;
    bool has_full_attention_ = false, has_windows_ = false, can_attend_host_ = false, can_move_up_ = false;
    int64_t num_window_losses_ = 0;  // losses of blocks after which a match may be shorter and need fewer window blocks
    PrefixIndex index_;
    Boundaries boundaries_;
    Offers offers_;
    KvEventLog events_;
    Evictions evictions_;
    // A load that found no room beside the prefixes that end with the keys `kept`, from which nothing may be evicted.
    struct NoRoom {
        int64_t num_moves;
        std::vector<int> wanted;
        std::vector<BlockKey> kept;
    };
    std::optional<NoRoom> no_room_;  // the load that was refused last
    int num_steps_ = 0;              // steps that have begun and not settled
    std::vector<NodeId> path_;       // scratch of acquire_prefix
};

}  // namespace swiftkv
