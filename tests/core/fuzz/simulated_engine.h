// An engine that borrows and lends, simulated to the byte: every plan is carried out, layer by layer, copy by copy.
//
// It knows nothing of the scheduler's internal state. Memory holds a mark per token and layer that names all tokens up
// to that one; memory that no request may rely on is emptied. A step may read only the marks of its own requests. This
// is the oracle of tests/core/lending_oracle.py and lending_storage_oracle.py again, written independently and fast
// enough for a fuzzer.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "scheduler.h"

namespace swiftkv::fuzz {

// The scheduler did something wrong.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void require(bool holds, const char* what) {
    if (!holds) throw Failure(what);
}

struct Setup {
    std::vector<GroupSpec> groups;  // without byte sizes and offsets, which the engine fills in
    std::vector<Link> lend, borrow;
    std::vector<int> waste_bytes;  // per borrow link, at the end of each extent
    SchedulerLimits limits;
    WritePolicy write_policy = WritePolicy::kNever;  // kNever: there is no storage
    bool is_changing = false;  // storage goes and comes, prefixes are offered, and blocks are loaded one by one
    int max_kv_events = 0;     // 0: events are off

    bool shares_extents() const { return groups[0].blocks_per_extent > 0; }
    bool has_storage() const { return write_policy != WritePolicy::kNever; }
};

struct Prompt {
    std::vector<TokenId> tokens;
    int max_tokens = 1;
    int min_tokens = 0;
    std::optional<TokenId> stop = {};
    uint8_t cache_namespace = 0;
    bool skip_prefix_match = false;
    int64_t priority = 0;
    int flow = 0;
    bool is_held = false;  // it waits for an answer from storage
};

class SimulatedEngine {
  public:
    // Throws std::invalid_argument for a setup that the scheduler refuses.
    explicit SimulatedEngine(Setup setup);

    const Setup& setup() const { return setup_; }
    size_t num_open() const { return open_.size(); }
    std::vector<RequestId> request_ids() const;

    void add(const Prompt& prompt);
    void abort(RequestId id);
    bool schedule();
    // Carries out the oldest step in progress and commits it. The `broken`-th row that samples, if there are so many,
    // gets no token.
    void commit(int broken = -1);
    // Makes the last step in progress fail after `num_events` of its events.
    void abandon(int num_events);
    void reset_prefix_cache() { scheduler_.reset_prefix_cache(); }

    // These name up to `count` of the extents in the right state, from the `first`-th on.
    void borrow(int link, int first, int count);
    void recall(int link, int first, int count);
    void take_returned();
    void lose(int link);
    void lend(int link, int count);
    void take_back(int link, int first, int count);

    // Requests that wait for an answer from storage, and the transfers, from 0, in which it reads blocks for them.
    std::vector<RequestId> held_ids() const { return {held_.begin(), held_.end()}; }
    int num_transfers() const { return static_cast<int>(transfers_.size()); }
    // Copies the offered blocks to storage; nothing is lent or returned meanwhile.
    void store(int max_blocks);
    // Begins to load those of a held request's first `max_blocks` blocks that storage has.
    void begin_load(RequestId id, int max_blocks);
    // Begins to load the blocks from `first` on that storage has, the last one first, and lets the request compute its
    // front meanwhile.
    void meet(RequestId id, int first);
    void let_go(RequestId id);
    // Ends the next loads of a transfer, successfully or not.
    void read(int transfer, int num_blocks, bool is_loaded);
    // Stops waiting for the rest of a transfer, which storage may still write.
    void give_up(int transfer);
    // lose_storage() takes storage away with everything in it; find_storage() attaches an empty one.
    bool is_storage_away() const { return is_storage_away_; }
    void lose_storage(bool is_filled_before);
    void find_storage();
    // Offers the blocks of a prefix that are here, and stores them at once or later.
    void offer_prefix(std::span<const TokenId> tokens, uint8_t cache_namespace, bool is_stored);

    // The last full block of a prompt is loaded alone, from outside of storage. Loads count from 0.
    int num_loads() const { return static_cast<int>(loads_.size()); }
    void begin_loading(std::span<const TokenId> tokens, uint8_t cache_namespace);
    void end_loading(int load, bool is_loaded);

    // Lets a follower of the prefix index read the waiting events.
    void take_events();

    bool has_pins() const { return !pins_.empty(); }
    void pin(std::span<const TokenId> tokens, uint8_t cache_namespace, double max_share);
    // Removes the `pick`-th pin, modulo their number.
    void unpin(int pick);

    // Checks everything that must hold after every operation.
    void check() const;
    // Runs until all requests for which there can be room have finished.
    void drain();

  private:
    using Mark = uint64_t;  // 0: nothing that may be read
    struct Request {
        std::vector<TokenId> tokens;
        std::vector<Mark> prefixes;  // of the tokens up to each
        int prompt_len, last_len, min_tokens;
        std::optional<TokenId> stop;
        std::vector<TokenId> draft = {};
        const char* misread = nullptr;  // an error if a token comes before the request is computed again
    };
    struct Draft {
        std::vector<TokenId> tokens;
        std::vector<Mark> prefixes;  // of the tokens up to each
    };
    struct Step {
        std::unique_ptr<StepPlan> plan;
        int64_t number;
        std::map<RequestId, Draft> drafts = {};  // of the rows that sample
        std::set<RequestId> dropped = {};        // requests that were dropped since the step was planned
    };
    // A block on its way up, with the bytes that storage has of it.
    struct Loading {
        int group;
        BlockId block;
        BlockKey key;
        std::vector<Mark> marks;
    };
    using Name = std::pair<BlockKey, int>;  // a key and a group
    struct Transfer {
        std::deque<Loading> blocks;  // in the order in which they are read
        bool is_forgotten = false;
    };
    enum class Tenure : uint8_t { kNone, kHeld, kRecalled, kOrphaned };
    struct Extent {
        Tenure tenure = Tenure::kNone;
        int64_t last_step = 0;  // of an orphan: the last step that may still access it
    };
    struct Row {
        Request* request;    // null: the row does not count
        const Draft* draft;  // null: it does not sample
        int begin, end;
        const int32_t* table;

        // Returns the mark that names the tokens up to position `i`.
        Mark prefix(size_t i) const {
            const size_t num_known = request->tokens.size();
            return i < num_known ? request->prefixes[i + 1] : draft->prefixes.at(i - num_known);
        }
    };

    void append(Request& request, TokenId token) const;
    void draft_some();
    std::map<RequestId, Draft> drafts_of(const StepPlan& plan) const;
    FinishReason expected_reason(const Request& request) const;
    void take_token(RequestId id, TokenId token, FinishReason reason);
    void check_plan(const StepPlan& plan) const;
    void check_tokens(const Step& step) const;
    void end_step();
    std::vector<Row> rows(const Step& step, int group, int layer);

    // Makes the moves within the pool that come before anything else. If they fail, the bytes at their ends are
    // unknown.
    void move(const StepPlan& plan, bool is_done);
    // Makes the events of a step; returns false once `budget` of them have happened.
    bool run(const Step& step, int group, int budget, bool is_checked);
    void spoil_staged(const StepPlan& plan, int group);
    void copy_to_peer(int group, const CopyRuns& runs, int layer);
    void copy_from_peer(int group, const CopyRuns& runs, int layer);
    void write(const Step& step, int group, int layer);
    void read(const Step& step, int group, int layer);

    // Return the marks of the layer block at a place; throw Failure if the engine may not access it.
    Mark* local_marks(int group, int64_t layer_block);
    Mark* local_marks_at(int group, int64_t offset_bytes);
    Mark* peer_marks_at(int group, int64_t link, int64_t offset_bytes);
    Mark* table_marks(int group, int32_t entry, int layer);
    Mark* block_marks(int group, BlockId local) { return local_marks(group, local * setup_.groups[group].num_layers); }
    int marks_per_block(int group) const { return setup_.groups[group].num_layers * setup_.limits.block_size; }
    // The index of the layer block in the pool at which a group's blocks begin.
    int64_t first_of(int group) const;
    bool is_lent(int64_t layer_block) const;
    // `prefixes`: as in Request.
    std::vector<Mark> expected_marks(std::span<const Mark> prefixes, int group, int index) const;
    std::vector<BlockKey> keys_of(std::span<const TokenId> tokens, uint8_t cache_namespace) const;
    // Returns the number of blocks of the prefix that is loaded, and the number that are now loading.
    std::pair<int, size_t> begin_load(RequestId id, int max_blocks, int first);
    // Notes the blocks that are loading: new storage may lack them, and they are not offered to it.
    void doubt_loading();
    std::vector<Name> usable_prefix(std::span<const BlockKey> keys) const;
    void check_all_is_stored() const;
    bool may_have_dropped_offers() const;
    void apply(const KvEvent& event, std::span<const TokenId> tokens);
    void check_follower() const;
    void note_lost_pins();
    void empty_extent(int link, int extent);
    std::vector<int32_t> extents_in(int link, Tenure tenure) const;

    Setup setup_;
    Scheduler scheduler_;
    std::map<RequestId, Request> requests_;
    RequestId next_id_ = 0;
    std::deque<Step> open_;
    int64_t num_planned_ = 0;
    double now_s_ = 0;
    std::vector<TokenId> last_tokens_;      // by row slot
    std::vector<Mark> local_;               // of the pool, one per token and layer block
    std::vector<std::vector<Mark>> peers_;  // per borrow link
    std::vector<std::vector<Extent>> borrowed_;
    std::vector<std::set<int>> lent_;
    std::set<RequestId> held_;
    std::map<Name, std::vector<Mark>> storage_;
    std::vector<Transfer> transfers_;
    std::vector<std::vector<Loading>> loads_;  // of one block each, in every group
    bool is_storage_away_ = false;
    bool has_full_offers_ = false;  // offers may have been dropped because their queue was full
    std::set<Name> doubtful_;       // blocks that storage may lack: doubt_loading() noted them, or they came alone
    std::set<std::tuple<BlockKey, int, Place>> followed_;  // the blocks that a follower of the events knows
    bool is_follower_behind_ = false;                      // events were dropped, so it knows fewer than there are
    std::set<PinId> pins_;
    PinId next_pin_ = 0;
};

}  // namespace swiftkv::fuzz
