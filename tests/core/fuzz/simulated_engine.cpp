// The file is long because it is one model: all rules that the scheduler must obey are in one place.
#include "simulated_engine.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <tuple>
#include <utility>

namespace swiftkv::fuzz {

namespace {

constexpr int kWidthBytes = 64;  // of a layer block
constexpr int kPeerBaseBytes = 10'000;
constexpr int kLocalBaseBytes = 1'000;
constexpr int kVocabulary = 3;
constexpr int kMaxStepsToDrain = 2'000;

uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t x = a * 0x9e3779b97f4a7c15 + b + 1;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return (x ^ (x >> 31)) | 1;  // never 0
}

// The token behind `length` tokens, which `prefix` names.
TokenId sampled_behind(uint64_t prefix, size_t length) {
    return static_cast<TokenId>(mix(prefix, length) % kVocabulary);
}

Setup with_bytes(Setup setup) {
    int64_t base = kLocalBaseBytes;
    for (GroupSpec& group : setup.groups) {
        group.layer_block_bytes = kWidthBytes;
        group.base_offset_bytes = base;
        if (!setup.shares_extents()) base += int64_t{group.num_blocks} * group.num_layers * kWidthBytes;
    }
    for (size_t i = 0; i < setup.borrow.size(); ++i) {
        Link& link = setup.borrow[i];
        link.extent_bytes =
            int64_t{link.blocks_per_extent} * setup.groups[link.group].num_layers * kWidthBytes + setup.waste_bytes[i];
        link.base_offset_bytes = kPeerBaseBytes;
    }
    return setup;
}

// Returns the mark that lies in the place of a token's KV; `prefix` names the tokens up to it.
uint64_t mark_of(uint64_t prefix, int group, int layer) {
    return mix(mix(prefix, static_cast<uint64_t>(group)), static_cast<uint64_t>(layer));
}

template <class T>
std::vector<T> picked(const std::vector<T>& all, int first, int count) {
    std::vector<T> found;
    const int size = static_cast<int>(all.size());
    for (int i = 0; i < std::min(count, size); ++i) found.push_back(all[(first + i) % size]);
    return found;
}

}  // namespace

SimulatedEngine::SimulatedEngine(Setup setup)
    : setup_(with_bytes(std::move(setup))),
      scheduler_(setup_.groups, setup_.limits, setup_.lend, setup_.borrow),
      last_tokens_(setup_.limits.max_num_seqs),
      lent_(setup_.lend.size()) {
    const int size = setup_.limits.block_size;
    for (int g = 0; g < static_cast<int>(setup_.groups.size()); ++g) {
        const int64_t end = first_of(g) + int64_t{setup_.groups[g].num_blocks} * setup_.groups[g].num_layers;
        local_.resize(std::max<size_t>(local_.size(), end * size));
    }
    scheduler_.set_write_policy(setup_.write_policy);
    if (setup_.max_kv_events > 0) scheduler_.enable_kv_events(setup_.max_kv_events);
    for (const Link& link : setup_.borrow) {
        const int layers = setup_.groups[link.group].num_layers;
        peers_.emplace_back(size * layers * link.num_extents * link.blocks_per_extent);
        borrowed_.emplace_back(link.num_extents);
    }
}

std::vector<RequestId> SimulatedEngine::request_ids() const {
    std::vector<RequestId> ids;
    for (const auto& [id, request] : requests_) ids.push_back(id);
    return ids;
}

// ---- requests ----

void SimulatedEngine::append(Request& request, TokenId token) const {
    request.prefixes.push_back(mix(request.prefixes.back(), token));
    request.tokens.push_back(token);
}

void SimulatedEngine::add(const Prompt& prompt) {
    std::vector<TokenId> stop;
    if (prompt.stop) stop.push_back(*prompt.stop);
    scheduler_.add_request({.id = next_id_,
                            .prompt = prompt.tokens,
                            .max_tokens = prompt.max_tokens,
                            .min_tokens = prompt.min_tokens,
                            .stop_token_ids = stop,
                            .cache_namespace = {&prompt.cache_namespace, 1},
                            .skip_prefix_match = prompt.skip_prefix_match,
                            .priority = prompt.priority,
                            .arrival_s = now_s_,
                            .flow = prompt.flow,
                            .flow_weight = 1.0 + prompt.flow});
    if (prompt.is_held) {
        scheduler_.hold(next_id_);
        held_.insert(next_id_);
    }
    const int length = static_cast<int>(prompt.tokens.size());
    Request request{.tokens = {},
                    .prefixes = {mix(0, prompt.cache_namespace)},
                    .prompt_len = length,
                    .last_len = std::min(length + prompt.max_tokens, setup_.limits.max_model_len),
                    .min_tokens = prompt.min_tokens,
                    .stop = prompt.stop};
    for (const TokenId token : prompt.tokens) append(request, token);
    requests_.emplace(next_id_++, std::move(request));
}

void SimulatedEngine::abort(RequestId id) {
    scheduler_.abort({&id, 1});
    requests_.erase(id);
    held_.erase(id);
}

// Sets drafts for some of the requests; the first guesses are right. They depend only on the request and the step's
// number, so an input of the fuzzer need not contain them.
void SimulatedEngine::draft_some() {
    for (auto& [id, request] : requests_) {
        const uint64_t dice = mix(id, static_cast<uint64_t>(num_planned_));
        if (dice % 16 >= 5) continue;
        const size_t num_right = (dice >> 8) % 4, num_wrong = (dice >> 16) % 4;
        request.draft.clear();
        Mark prefix = request.prefixes.back();
        for (size_t i = 0; i < num_right + num_wrong; ++i) {
            const TokenId right = sampled_behind(prefix, request.tokens.size() + i);
            request.draft.push_back(i < num_right ? right : static_cast<TokenId>((dice >> (20 + i)) % kVocabulary));
            prefix = mix(prefix, request.draft.back());
        }
        scheduler_.set_draft(id, request.draft);
    }
}

std::map<RequestId, SimulatedEngine::Draft> SimulatedEngine::drafts_of(const StepPlan& plan) const {
    std::map<RequestId, Draft> drafts;
    for (const int32_t s : plan.logits_seqs) {
        const RequestId id = plan.request_ids.at(s);
        const auto [found, is_first] = drafts.try_emplace(id);
        if (is_first) continue;
        Draft& draft = found->second;
        const Request& request = requests_.at(id);
        require(draft.tokens.size() < request.draft.size(), "a row samples more often than its draft allows");
        draft.tokens.push_back(request.draft[draft.tokens.size()]);
        draft.prefixes.push_back(
            mix(draft.prefixes.empty() ? request.prefixes.back() : draft.prefixes.back(), draft.tokens.back()));
    }
    return drafts;
}

FinishReason SimulatedEngine::expected_reason(const Request& request) const {
    const int length = static_cast<int>(request.tokens.size());
    if (length - request.prompt_len >= request.min_tokens && request.tokens.back() == request.stop)
        return FinishReason::kStop;
    return length >= request.last_len ? FinishReason::kLength : FinishReason::kRunning;
}

void SimulatedEngine::take_token(RequestId id, TokenId token, FinishReason reason) {
    if (reason == FinishReason::kRejected) return;
    if (reason == FinishReason::kDropped) {
        for (Step& step : open_) step.dropped.insert(id);
        return;
    }
    const auto found = requests_.find(id);
    if (found == requests_.end()) {
        require(reason == FinishReason::kAborted, "a row of a request that has ended counts");
        return;
    }
    Request& request = found->second;
    if (token < 0) {
        require(reason == FinishReason::kBroken, "a request without a token goes on");
        requests_.erase(found);
        return;
    }
    if (request.misread) throw Failure(request.misread);
    append(request, token);
    request.draft.clear();
    require(reason == expected_reason(request), "a request ends too early or too late");
    if (reason != FinishReason::kRunning) requests_.erase(found);
}

// ---- extents ----

std::vector<int32_t> SimulatedEngine::extents_in(int link, Tenure tenure) const {
    std::vector<int32_t> extents;
    for (int e = 0; e < static_cast<int>(borrowed_[link].size()); ++e)
        if (borrowed_[link][e].tenure == tenure) extents.push_back(e);
    return extents;
}

void SimulatedEngine::borrow(int link, int first, int count) {
    const std::vector<int32_t> extents = picked(extents_in(link, Tenure::kNone), first, count);
    for (const int32_t extent : extents) borrowed_[link][extent].tenure = Tenure::kHeld;
    scheduler_.borrow(link, extents);
}

void SimulatedEngine::recall(int link, int first, int count) {
    const std::vector<int32_t> extents = picked(extents_in(link, Tenure::kHeld), first, count);
    for (const int32_t extent : extents) borrowed_[link][extent].tenure = Tenure::kRecalled;
    scheduler_.recall(link, extents);
}

void SimulatedEngine::take_returned() {
    for (int link = 0; link < static_cast<int>(borrowed_.size()); ++link) {
        for (const int extent : scheduler_.take_returned(link)) {
            require(borrowed_[link].at(extent).tenure == Tenure::kRecalled, "an extent is returned that is not due");
            borrowed_[link][extent].tenure = Tenure::kNone;
            empty_extent(link, extent);
        }
    }
}

void SimulatedEngine::lose(int link) {
    scheduler_.lose(link);
    note_lost_pins();
    for (int e = 0; e < static_cast<int>(borrowed_[link].size()); ++e) {
        Extent& extent = borrowed_[link][e];
        if (extent.tenure != Tenure::kHeld && extent.tenure != Tenure::kRecalled) continue;
        empty_extent(link, e);
        if (open_.empty()) {
            extent.tenure = Tenure::kNone;
        } else {
            extent = {Tenure::kOrphaned, open_.back().number};
        }
    }
}

void SimulatedEngine::empty_extent(int link, int extent) {
    const Link& spec = setup_.borrow[link];
    const int marks = spec.blocks_per_extent * setup_.groups[spec.group].num_layers * setup_.limits.block_size;
    std::fill_n(peers_[link].begin() + extent * marks, marks, 0);
}

void SimulatedEngine::lend(int link, int count) {
    const Link& spec = setup_.lend[link];
    const std::vector<int> extents = scheduler_.lend(link, count);
    require(static_cast<int>(extents.size()) <= count, "more is lent than was asked for");
    const int marks = spec.blocks_per_extent * setup_.groups[spec.group].num_layers * setup_.limits.block_size;
    for (const int extent : extents) {
        require(extent >= 0 && extent < spec.num_extents, "an extent is lent that the link does not have");
        require(lent_[link].insert(extent).second, "an extent is lent twice");
        std::fill_n(local_.begin() + first_of(spec.group) * setup_.limits.block_size + extent * marks, marks, 0);
    }
}

void SimulatedEngine::take_back(int link, int first, int count) {
    const std::vector<int32_t> extents =
        picked(std::vector<int32_t>(lent_[link].begin(), lent_[link].end()), first, count);
    for (const int32_t extent : extents) lent_[link].erase(extent);
    scheduler_.take_back(link, extents);
}

// ---- storage ----

void SimulatedEngine::store(int max_blocks) {
    has_full_offers_ |= may_have_dropped_offers();
    const std::vector<StoredBlock> taken = scheduler_.take_offers(max_blocks);
    require(static_cast<int>(taken.size()) <= max_blocks, "more is stored than was asked for");
    require(taken.empty() || !is_storage_away_, "a block is stored where there is no storage");
    for (int link = 0; !taken.empty() && link < static_cast<int>(setup_.lend.size()); ++link)
        require(scheduler_.lend(link, 4).empty(), "an extent is lent while storage copies");
    for (int link = 0; !taken.empty() && link < static_cast<int>(setup_.borrow.size()); ++link)
        require(scheduler_.take_returned(link).empty(), "an extent is returned while storage copies");
    for (const StoredBlock& block : taken) {
        const Mark* first = block.link == kNone ? local_marks_at(block.group, block.offset_bytes)
                                                : peer_marks_at(block.group, block.link, block.offset_bytes);
        const std::vector<Mark> marks(first, first + marks_per_block(block.group));
        require(std::count(marks.begin(), marks.end(), 0) == 0, "a block is stored whose bytes are not there");
        const auto [known, is_new] = storage_.try_emplace({block.key, block.group}, marks);
        require(known->second == marks, "one key names different bytes");
    }
    scheduler_.end_copying();
}

std::vector<SimulatedEngine::Mark> SimulatedEngine::expected_marks(std::span<const Mark> prefixes, int g,
                                                                   int index) const {
    const int size = setup_.limits.block_size;
    std::vector<Mark> marks;
    for (int layer = 0; layer < setup_.groups[g].num_layers; ++layer)
        for (int i = index * size; i < (index + 1) * size; ++i) marks.push_back(mark_of(prefixes[i + 1], g, layer));
    return marks;
}

std::vector<BlockKey> SimulatedEngine::keys_of(std::span<const TokenId> tokens, uint8_t cache_namespace) const {
    std::vector<BlockKey> keys;
    extend_keys(keys, blake3({&cache_namespace, 1}), tokens, setup_.limits.block_size);
    return keys;
}

std::pair<int, size_t> SimulatedEngine::begin_load(RequestId id, int max_blocks, int first) {
    const Scheduler::Lookup found = scheduler_.look_up(id);
    const int num_groups = static_cast<int>(setup_.groups.size());
    std::vector<uint8_t> is_stored;
    for (const BlockKey& key : found.keys)
        for (int g = 0; g < num_groups; ++g) is_stored.push_back(storage_.count({key, g}));
    const int length = scheduler_.loadable(id, is_stored, max_blocks);
    Transfer transfer;
    for (const LoadingBlock& load : scheduler_.begin_load(id, length, std::min(first, length))) {
        require(load.index >= first && load.index < length, "a block is loaded that nobody wants");
        require(!found.is_resident[load.index * num_groups + load.group], "a block is loaded that is here");
        const auto stored = storage_.find({found.keys[load.index], load.group});
        require(stored != storage_.end(), "a block is loaded that storage does not have");
        require(stored->second == expected_marks(requests_.at(id).prefixes, load.group, load.index),
                "a key names other bytes than its request's");
        Mark* const at = local_marks_at(load.group, load.offset_bytes);
        require(at == block_marks(load.group, load.block), "a block lies at its offset");
        std::fill_n(at, marks_per_block(load.group), 0);
        transfer.blocks.push_back({load.group, load.block, stored->first.first, stored->second});
    }
    const size_t num_loading = transfer.blocks.size();
    if (num_loading > 0) transfers_.push_back(std::move(transfer));
    return {length, num_loading};
}

void SimulatedEngine::begin_load(RequestId id, int max_blocks) {
    begin_load(id, max_blocks, 0);
}

void SimulatedEngine::meet(RequestId id, int first) {
    const auto [length, num_loading] = begin_load(id, setup_.limits.max_model_len, first);
    if (num_loading > 0) std::reverse(transfers_.back().blocks.begin(), transfers_.back().blocks.end());
    scheduler_.meet(id, length);
    held_.erase(id);
}

void SimulatedEngine::let_go(RequestId id) {
    scheduler_.let_go(id);
    held_.erase(id);
}

void SimulatedEngine::read(int index, int num_blocks, bool is_loaded) {
    Transfer& transfer = transfers_.at(index);
    std::vector<LoadedBlock> blocks;
    for (; num_blocks > 0 && !transfer.blocks.empty(); --num_blocks, transfer.blocks.pop_front()) {
        const auto& [g, block, key, marks] = transfer.blocks.front();
        Mark* const at = block_marks(g, block);
        if (is_loaded) {
            std::copy(marks.begin(), marks.end(), at);
        } else {
            std::fill_n(at, marks.size(), 0);
        }
        blocks.push_back({g, block});
    }
    scheduler_.end_load(blocks, is_loaded);
    if (transfer.blocks.empty()) transfers_.erase(transfers_.begin() + index);
}

void SimulatedEngine::give_up(int index) {
    Transfer& transfer = transfers_.at(index);
    if (std::exchange(transfer.is_forgotten, true)) return;
    std::vector<LoadedBlock> blocks;
    for (const Loading& loading : transfer.blocks) blocks.push_back({loading.group, loading.block});
    scheduler_.forget_loading(blocks);
}

void SimulatedEngine::lose_storage(bool is_filled_before) {
    if (is_filled_before) {
        scheduler_.set_write_policy(WritePolicy::kWriteThrough);
        store(std::numeric_limits<int>::max());
        if (scheduler_.num_offers() == 0) check_all_is_stored();
    }
    scheduler_.set_write_policy(WritePolicy::kNever);
    require(scheduler_.num_offers() == 0, "something is on offer where there is no storage");
    storage_.clear();
    is_storage_away_ = true;
}

void SimulatedEngine::find_storage() {
    scheduler_.set_write_policy(setup_.write_policy);
    is_storage_away_ = has_full_offers_ = false;
    doubt_loading();
}

void SimulatedEngine::doubt_loading() {
    for (const Transfer& transfer : transfers_)
        for (const Loading& loading : transfer.blocks) doubtful_.insert({loading.key, loading.group});
}

// Returns the blocks that the longest usable prefix needs, from its definition.
std::vector<SimulatedEngine::Name> SimulatedEngine::usable_prefix(std::span<const BlockKey> keys) const {
    std::set<Name> here;
    for (const ResidentBlock& block : scheduler_.resident_blocks()) here.insert({block.key, block.group});
    const int size = setup_.limits.block_size, num_groups = static_cast<int>(setup_.groups.size());
    for (int length = static_cast<int>(keys.size()); length > 0; --length) {
        std::vector<Name> names;
        for (int g = 0; g < num_groups; ++g) {
            const int window = setup_.groups[g].window;
            for (int i = window > 0 ? std::max(0, length - ceil_div(window - 1, size)) : 0; i < length; ++i)
                names.emplace_back(keys[i], g);
        }
        const auto is_here = [&](const Name& name) { return here.count(name) > 0; };
        if (std::all_of(names.begin(), names.end(), is_here)) return names;
    }
    return {};
}

void SimulatedEngine::offer_prefix(std::span<const TokenId> tokens, uint8_t cache_namespace, bool is_stored) {
    const std::vector<BlockKey> keys = keys_of(tokens, cache_namespace);
    scheduler_.offer_prefix(keys);
    if (!is_stored) return;
    store(std::numeric_limits<int>::max());
    // A step in progress may keep storage from copying. For offers, blocks that are loading count as here.
    if (scheduler_.num_offers() > 0 || is_storage_away_ || num_transfers() + num_loads() > 0) return;
    for (const Name& name : usable_prefix(keys))
        require(storage_.count(name) || doubtful_.count(name) || has_full_offers_,
                "a prefix that is offered is stored");
}

// Checks that storage has all blocks that are written through: the full-attention blocks that are here.
void SimulatedEngine::check_all_is_stored() const {
    for (const ResidentBlock& block : scheduler_.resident_blocks()) {
        const Name name{block.key, block.group};
        if (setup_.groups[block.group].window > 0 || doubtful_.count(name)) continue;
        require(storage_.count(name) || has_full_offers_, "a block that is written through is not in storage");
    }
}

bool SimulatedEngine::may_have_dropped_offers() const {
    int num_blocks = 0;  // the most offers that can wait
    for (const GroupSpec& group : setup_.groups) num_blocks += group.num_blocks;
    for (const Link& link : setup_.borrow) num_blocks += link.num_extents * link.blocks_per_extent;
    return scheduler_.num_offers() >= num_blocks;
}

// ---- one block from elsewhere ----

void SimulatedEngine::begin_loading(std::span<const TokenId> tokens, uint8_t cache_namespace) {
    const std::vector<BlockKey> keys = keys_of(tokens, cache_namespace);
    if (keys.empty()) return;
    const std::vector<BlockId> blocks = scheduler_.begin_loading(keys.back());
    if (blocks.empty()) return;
    require(blocks.size() == setup_.groups.size(), "a block is loaded in every group");
    for (const ResidentBlock& block : scheduler_.resident_blocks())
        require(block.key != keys.back(), "a block is loaded that is here");
    std::vector<Mark> prefixes{mix(0, cache_namespace)};
    for (const TokenId token : tokens) prefixes.push_back(mix(prefixes.back(), token));
    std::vector<Loading>& load = loads_.emplace_back();
    for (int g = 0; g < static_cast<int>(blocks.size()); ++g) {
        std::fill_n(block_marks(g, blocks[g]), marks_per_block(g), 0);
        load.push_back({g, blocks[g], keys.back(), expected_marks(prefixes, g, static_cast<int>(keys.size()) - 1)});
        doubtful_.insert({keys.back(), g});  // it comes from elsewhere
    }
}

void SimulatedEngine::end_loading(int index, bool is_loaded) {
    std::vector<BlockId> blocks;
    for (const auto& [g, block, key, marks] : loads_.at(index)) {
        if (is_loaded) std::copy(marks.begin(), marks.end(), block_marks(g, block));
        blocks.push_back(block);
    }
    scheduler_.end_loading(blocks, is_loaded);
    loads_.erase(loads_.begin() + index);
}

// ---- events ----

void SimulatedEngine::take_events() {
    const KvEvents taken = scheduler_.take_kv_events();
    require(static_cast<int>(taken.events.size()) <= setup_.max_kv_events, "more events wait than may");
    std::span<const TokenId> tokens = taken.tokens;
    for (const KvEvent& event : taken.events) {
        const size_t num_tokens = event.has_tokens ? setup_.limits.block_size : 0;
        require(tokens.size() >= num_tokens, "an event has the tokens that it says it has");
        apply(event, tokens.first(num_tokens));
        tokens = tokens.subspan(num_tokens);
    }
    require(tokens.empty(), "tokens belong to an event");
    check_follower();
}

void SimulatedEngine::apply(const KvEvent& event, std::span<const TokenId> tokens) {
    const std::tuple entry(event.key, event.group, event.place);
    switch (event.kind) {
        case KvEventKind::kCleared:
            followed_.clear();
            is_follower_behind_ = true;
            break;
        case KvEventKind::kRemoved:
            require(followed_.erase(entry) == 1 || is_follower_behind_, "an event removes what was never stored");
            break;
        case KvEventKind::kStored:
            require(followed_.insert(entry).second, "an event stores what is there");
            if (tokens.empty()) break;
            std::vector<BlockKey> keys;
            extend_keys(keys, event.parent, tokens, setup_.limits.block_size);
            require(keys.at(0) == event.key, "the tokens of an event are those that its key names");
    }
}

void SimulatedEngine::check_follower() const {
    std::set<std::tuple<BlockKey, int, Place>> here;
    for (const ResidentBlock& block : scheduler_.resident_blocks()) here.insert({block.key, block.group, block.place});
    require(std::includes(here.begin(), here.end(), followed_.begin(), followed_.end()),
            "a follower of the events believes what is not here");
    require(is_follower_behind_ || followed_.size() == here.size(), "a follower of all events knows all that is here");
}

// ---- pins ----

void SimulatedEngine::pin(std::span<const TokenId> tokens, uint8_t cache_namespace, double max_share) {
    const PinOutcome outcome = scheduler_.pin(next_pin_, keys_of(tokens, cache_namespace), max_share);
    require(outcome.is_kept == (outcome.length > 0 && outcome.share <= max_share), "a pin is kept if it may be");
    if (outcome.is_kept) pins_.insert(next_pin_);
    ++next_pin_;
}

void SimulatedEngine::unpin(int pick) {
    const auto pin = std::next(pins_.begin(), pick % static_cast<int>(pins_.size()));
    require(scheduler_.unpin(*pin), "a pin that was kept and not lost is known");
    pins_.erase(pin);
}

void SimulatedEngine::note_lost_pins() {
    for (const PinId id : scheduler_.take_lost_pins())
        require(pins_.erase(id) == 1, "a pin is lost that was not there");
}

// ---- steps ----

bool SimulatedEngine::schedule() {
    draft_some();
    std::unique_ptr<StepPlan> plan = scheduler_.schedule(++now_s_);
    note_lost_pins();
    if (!plan) {
        require(!scheduler_.schedule(now_s_), "there was something to do, had one asked twice");
        return false;
    }
    check_plan(*plan);
    for (const RequestId id : plan->preempted_request_ids) {
        const auto found = requests_.find(id);
        require(found != requests_.end(), "a plan names a preempted request that has ended");
        found->second.misread = nullptr;
    }
    std::map<RequestId, Draft> drafts = drafts_of(*plan);
    open_.push_back({std::move(plan), ++num_planned_, std::move(drafts)});
    return true;
}

void SimulatedEngine::check_plan(const StepPlan& plan) const {
    const SchedulerLimits& limits = setup_.limits;
    const size_t num_tokens = plan.token_ids.size(), num_seqs = plan.request_ids.size();
    require(plan.positions.size() == num_tokens && plan.query_starts.size() == num_seqs + 1 &&
                plan.context_lens.size() == num_seqs && plan.row_slots.size() == num_seqs,
            "the arrays of a plan have the same length");
    require(static_cast<int>(num_tokens) <= limits.max_num_batched_tokens ||
                (num_seqs == 1 && !limits.enable_chunked_prefill),
            "a step is larger than the budget");
    std::set<RequestId> ids(plan.request_ids.begin(), plan.request_ids.end());
    std::set<int32_t> slots(plan.row_slots.begin(), plan.row_slots.end());
    require(ids.size() == num_seqs && slots.size() == num_seqs, "a request or a row slot is twice in one step");
    for (const int32_t slot : slots) require(slot >= 0 && slot < limits.max_num_seqs, "a row slot does not exist");
    for (size_t s = 0; s < num_seqs; ++s) {
        require(requests_.count(plan.request_ids[s]), "a request that has ended is planned");
        require(!held_.count(plan.request_ids[s]), "a request that is held is planned");
        const int begin = plan.query_starts[s], end = plan.query_starts[s + 1];
        require(begin < end, "a row of a plan has no token");
        for (int i = begin; i < end; ++i)
            require(plan.positions[i] == plan.context_lens[s] - (end - i), "positions follow each other");
    }
    require(plan.logits_rows.size() == plan.logits_seqs.size(), "every row that samples has a sequence");
    for (size_t i = 0; i < plan.logits_rows.size(); ++i) {
        const bool is_last = i + 1 == plan.logits_rows.size() || plan.logits_seqs[i + 1] != plan.logits_seqs[i];
        const int next = is_last ? plan.query_starts.at(plan.logits_seqs[i] + 1) : plan.logits_rows[i + 1];
        require(plan.logits_rows[i] == next - 1, "the last tokens of a row sample");
    }
}

void SimulatedEngine::check_tokens(const Step& step) const {
    const StepPlan& plan = *step.plan;
    for (size_t s = 0; s < plan.request_ids.size(); ++s) {
        const auto found = requests_.find(plan.request_ids[s]);
        if (found == requests_.end() || step.dropped.count(plan.request_ids[s])) continue;
        std::vector<TokenId> tokens = found->second.tokens;
        if (const auto draft = step.drafts.find(plan.request_ids[s]); draft != step.drafts.end())
            tokens.insert(tokens.end(), draft->second.tokens.begin(), draft->second.tokens.end());
        require(plan.context_lens[s] <= static_cast<int>(tokens.size()), "a row ends behind its request");
        for (int i = plan.query_starts[s]; i < plan.query_starts[s + 1]; ++i) {
            const TokenId token = plan.token_ids[i] < 0 ? last_tokens_.at(~plan.token_ids[i]) : plan.token_ids[i];
            require(token == tokens[plan.positions[i]], "a step computes another token than its request's");
        }
    }
}

void SimulatedEngine::commit(int broken) {
    const Step& step = open_.front();
    const StepPlan& plan = *step.plan;
    check_tokens(step);
    move(plan, true);
    // The order of the groups' layers is not specified.
    const int num_groups = static_cast<int>(setup_.groups.size());
    for (int i = 0; i < num_groups; ++i) run(step, static_cast<int>((i + step.number) % num_groups), -1, true);
    std::vector<RequestId> ids;
    std::vector<TokenId> sampled;
    std::map<RequestId, size_t> num_sampled;
    for (const int32_t s : plan.logits_seqs) {
        ids.push_back(plan.request_ids[s]);
        const size_t i = num_sampled[ids.back()]++;
        const bool is_broken = static_cast<int>(sampled.size()) == broken;
        const auto found = requests_.find(ids.back());
        TokenId token = 0;
        if (found != requests_.end()) {
            const Mark prefix = i == 0 ? found->second.prefixes.back() : step.drafts.at(ids.back()).prefixes[i - 1];
            token = sampled_behind(prefix, found->second.tokens.size() + i);
        }
        sampled.push_back(is_broken ? -1 : token);
        last_tokens_[plan.row_slots[s]] = sampled.back();
    }
    const StepResult result = scheduler_.commit(sampled, 0.0);
    end_step();
    require(result.request_ids == ids && result.token_ids == sampled, "a result has the rows of its plan");
    for (size_t i = 0; i < ids.size(); ++i)
        take_token(ids[i], sampled[i], static_cast<FinishReason>(result.finish_reasons[i]));
}

void SimulatedEngine::abandon(int num_events) {
    while (open_.size() > 1) commit();
    move(*open_.front().plan, false);
    for (int g = 0; g < static_cast<int>(setup_.groups.size()); ++g) run(open_.front(), g, num_events, false);
    scheduler_.abandon();
    note_lost_pins();
    end_step();
}

void SimulatedEngine::end_step() {
    const int64_t number = open_.front().number;
    open_.pop_front();
    for (int link = 0; link < static_cast<int>(borrowed_.size()); ++link) {
        for (int e = 0; e < static_cast<int>(borrowed_[link].size()); ++e) {
            Extent& extent = borrowed_[link][e];
            if (extent.tenure != Tenure::kOrphaned || extent.last_step > number) continue;
            extent = {};
            empty_extent(link, e);
        }
    }
}

void SimulatedEngine::move(const StepPlan& plan, bool is_done) {
    for (size_t at = 0; at < plan.local_moves.size(); at += 3) {
        const int g = plan.local_moves[at], num_marks = marks_per_block(g);
        Mark* const from = block_marks(g, plan.local_moves[at + 1]);
        Mark* const to = block_marks(g, plan.local_moves[at + 2]);
        if (is_done) {
            std::copy_n(from, num_marks, to);
        } else {
            std::fill_n(to, num_marks, 0);
        }
        std::fill_n(from, num_marks, 0);
    }
}

// Makes the copies of a step in the order that layer streaming guarantees; with two buffers, loads run one layer ahead.
bool SimulatedEngine::run(const Step& step, int g, int budget, bool is_checked) {
    const StepPlan& plan = *step.plan;
    const int num_layers = setup_.groups[g].num_layers, num_buffers = std::max(1, plan.num_stream_buffers);
    const auto spend = [&] { return budget-- != 0; };
    const GroupCopies& copies = plan.copies[g];
    if (plan.num_stream_buffers > 0) spoil_staged(plan, g);
    int loaded = 0;
    for (int layer = 0; layer < num_layers; ++layer) {
        for (; loaded < std::min(num_layers, layer + num_buffers); ++loaded) {
            if (!spend()) return false;
            copy_to_peer(g, copies.spills, loaded);
            if (!spend()) return false;
            if (!copies.loads.empty()) copy_from_peer(g, copies.loads[loaded % num_buffers], loaded);
        }
        if (!spend()) return false;
        write(step, g, layer);
        if (is_checked) read(step, g, layer);
        if (!spend()) return false;
        if (!copies.stores.empty()) copy_to_peer(g, copies.stores[layer % num_buffers], layer);
    }
    return true;
}

void SimulatedEngine::spoil_staged(const StepPlan& plan, int g) {
    for (const auto& tables : plan.stream_tables)
        for (const int32_t entry : tables[g])
            if (is_staged(entry)) std::fill_n(local_marks(g, staged_place(entry)), setup_.limits.block_size, 0);
}

template <class Visit>
void for_each_layer_block(const CopyRuns& runs, int num_layers, int layer, Visit&& visit) {
    const int64_t block_bytes = int64_t{num_layers} * kWidthBytes;
    for (size_t at = 0; at < runs.rows.size(); at += 5) {
        const int64_t *row = &runs.rows[at], count = row[3];
        require(count > 0, "a run copies nothing");
        for (int64_t i = 0; i < count; ++i) {
            const int64_t local = row[2] + (row[4] ? i * kWidthBytes : i * block_bytes + layer * kWidthBytes);
            visit(row[0], row[1] + i * block_bytes + layer * kWidthBytes, local);
        }
    }
}

void SimulatedEngine::copy_to_peer(int g, const CopyRuns& runs, int layer) {
    for_each_layer_block(runs, setup_.groups[g].num_layers, layer, [&](int64_t link, int64_t peer, int64_t local) {
        std::copy_n(local_marks_at(g, local), setup_.limits.block_size, peer_marks_at(g, link, peer));
    });
}

void SimulatedEngine::copy_from_peer(int g, const CopyRuns& runs, int layer) {
    for_each_layer_block(runs, setup_.groups[g].num_layers, layer, [&](int64_t link, int64_t peer, int64_t local) {
        std::copy_n(peer_marks_at(g, link, peer), setup_.limits.block_size, local_marks_at(g, local));
    });
}

std::vector<SimulatedEngine::Row> SimulatedEngine::rows(const Step& step, int g, int layer) {
    const StepPlan& plan = *step.plan;
    const auto& table = plan.stream_tables[layer % std::max(1, plan.num_stream_buffers)][g];
    std::vector<Row> rows;
    for (size_t s = 0; s < plan.request_ids.size(); ++s) {
        const auto found = requests_.find(plan.request_ids[s]);
        const bool counts = found != requests_.end() && !step.dropped.count(plan.request_ids[s]);
        const int end = plan.context_lens[s], begin = end - (plan.query_starts[s + 1] - plan.query_starts[s]);
        const int first = plan.table_starts[g][s], last = plan.table_starts[g][s + 1];
        require(last - first == ceil_div(end, setup_.limits.block_size), "a row has a block for every token");
        const auto draft = step.drafts.find(plan.request_ids[s]);
        rows.push_back({counts ? &found->second : nullptr, draft == step.drafts.end() ? nullptr : &draft->second, begin,
                        end, table.data() + first});
    }
    return rows;
}

void SimulatedEngine::write(const Step& step, int g, int layer) {
    const int size = setup_.limits.block_size;
    std::set<const Mark*> written;
    for (const Row& row : rows(step, g, layer)) {
        for (int i = row.begin; i < row.end; ++i) {
            Mark* mark = table_marks(g, row.table[i / size], layer) + i % size;
            require(written.insert(mark).second, "two requests write to one place");
            *mark = row.request ? mark_of(row.prefix(i), g, layer) : mix(~0ull, i);
        }
    }
}

void SimulatedEngine::read(const Step& step, int g, int layer) {
    const int size = setup_.limits.block_size, window = setup_.groups[g].window;
    for (const Row& row : rows(step, g, layer)) {
        if (!row.request) continue;
        for (int i = window > 0 ? std::max(0, row.begin - window + 1) : 0; i < row.end; ++i) {
            const Mark mark = table_marks(g, row.table[i / size], layer)[i % size];
            if (mark != mark_of(row.prefix(i), g, layer))
                row.request->misread = "a token came from a step that read other bytes than its request's";
        }
    }
}

// ---- memory ----

SimulatedEngine::Mark* SimulatedEngine::local_marks(int g, int64_t layer_block) {
    const GroupSpec& spec = setup_.groups[g];
    require(layer_block >= 0 && layer_block < int64_t{spec.num_layers} * spec.num_blocks, "outside the group's pool");
    require(!is_lent(first_of(g) + layer_block), "a lent block is in use");
    return &local_[(first_of(g) + layer_block) * setup_.limits.block_size];
}

int64_t SimulatedEngine::first_of(int g) const {
    return (setup_.groups[g].base_offset_bytes - kLocalBaseBytes) / kWidthBytes;
}

bool SimulatedEngine::is_lent(int64_t layer_block) const {
    for (size_t i = 0; i < setup_.lend.size(); ++i) {
        const Link& link = setup_.lend[i];
        const int64_t within = layer_block - first_of(link.group);
        if (within >= 0 && lent_[i].count(within / setup_.groups[link.group].num_layers / link.blocks_per_extent))
            return true;
    }
    return false;
}

SimulatedEngine::Mark* SimulatedEngine::local_marks_at(int g, int64_t offset_bytes) {
    const int64_t within = offset_bytes - setup_.groups[g].base_offset_bytes;
    require(within % kWidthBytes == 0, "a copy does not begin at a layer block");
    return local_marks(g, within / kWidthBytes);
}

SimulatedEngine::Mark* SimulatedEngine::peer_marks_at(int g, int64_t link, int64_t offset_bytes) {
    require(link >= 0 && link < static_cast<int64_t>(setup_.borrow.size()), "a copy over a link that does not exist");
    const Link& spec = setup_.borrow[link];
    require(spec.group == g, "a copy over another group's link");
    const int64_t at = offset_bytes - spec.base_offset_bytes;
    const int64_t extent = at / spec.extent_bytes, within = at % spec.extent_bytes;
    require(at >= 0 && extent < spec.num_extents && borrowed_[link][extent].tenure != Tenure::kNone,
            "a copy reaches an extent that is not ours");
    const int64_t layer_blocks = int64_t{spec.blocks_per_extent} * setup_.groups[g].num_layers;
    require(within % kWidthBytes == 0 && within / kWidthBytes < layer_blocks, "a copy reaches past an extent's blocks");
    return &peers_[link][(extent * layer_blocks + within / kWidthBytes) * setup_.limits.block_size];
}

SimulatedEngine::Mark* SimulatedEngine::table_marks(int g, int32_t entry, int layer) {
    require(entry != kNoBlock, "a token inside the window has no block");
    return local_marks(g, is_staged(entry) ? staged_place(entry) : entry + layer);
}

// ---- checks ----

void SimulatedEngine::check() const {
    scheduler_.check_invariants();
    const SchedulerStats stats = scheduler_.stats();
    require(stats.num_running + stats.num_waiting == static_cast<int>(requests_.size()), "every request is known");
    std::vector<int> num_loading(stats.groups.size());
    for (const Transfer& transfer : transfers_)
        for (const Loading& loading : transfer.blocks) ++num_loading[loading.group];
    for (int& count : num_loading) count += num_loads();
    for (int g = 0; g < static_cast<int>(stats.groups.size()); ++g) {
        const GroupStats& s = stats.groups[g];
        require(s.free + s.used + s.cached + s.lent + s.in_flight + s.staging + s.loading + s.elsewhere == s.total &&
                    s.total == setup_.groups[g].num_blocks,
                "the pool equation");
        require(s.elsewhere == 0 || setup_.shares_extents(), "a group has its blocks to itself");
        require(s.loading == num_loading[g], "what storage reads is loading");
        require(s.pinned <= s.used && (has_pins() || s.pinned == 0), "what is pinned is in use");
        int lent = 0, held = 0;
        bool is_leaving = false;
        for (size_t i = 0; i < setup_.lend.size(); ++i)
            if (setup_.lend[i].group == g) lent += static_cast<int>(lent_[i].size()) * setup_.lend[i].blocks_per_extent;
        for (size_t i = 0; i < setup_.borrow.size(); ++i) {
            if (setup_.borrow[i].group != g) continue;
            for (const Extent& extent : borrowed_[i]) {
                held += extent.tenure == Tenure::kHeld ? setup_.borrow[i].blocks_per_extent : 0;
                is_leaving |= extent.tenure == Tenure::kRecalled || extent.tenure == Tenure::kOrphaned;
            }
        }
        const int borrowed = s.borrowed_free + s.borrowed_used + s.borrowed_cached + s.borrowed_in_flight;
        require(s.lent == lent, "lent blocks are those of the lent extents");
        require(is_leaving ? borrowed >= held : borrowed == held, "borrowed blocks are those of the held extents");
        require(!open_.empty() || s.in_flight + s.borrowed_in_flight == 0, "nothing is in flight between steps");
        require(!requests_.empty() || !open_.empty() || s.used + s.borrowed_used == s.pinned,
                "an idle engine uses no block but what is pinned");
    }
}

void SimulatedEngine::drain() {
    while (!open_.empty()) commit();
    while (!transfers_.empty()) read(0, setup_.limits.max_model_len * static_cast<int>(setup_.groups.size()), true);
    while (!loads_.empty()) end_loading(0, true);
    while (!held_.empty()) let_go(*held_.begin());
    for (int steps = 0; scheduler_.has_work(); ++steps) {
        require(steps < kMaxStepsToDrain, "requests never end");
        if (schedule()) {
            commit();
            take_returned();
            check();
            continue;
        }
        const std::vector<RequestId> stuck = scheduler_.starved(now_s_ + 1, 0.5);
        require(!stuck.empty() || !scheduler_.has_work(), "there is work, but nothing can run");
        for (const RequestId id : stuck) abort(id);
    }
    require(requests_.empty(), "a request is left over");
    take_returned();
    for (int link = 0; link < static_cast<int>(borrowed_.size()); ++link)
        require(extents_in(link, Tenure::kRecalled).empty(), "an engine at rest keeps a recalled extent");
    check();
    if (setup_.is_changing && setup_.write_policy == WritePolicy::kWriteThrough) {
        if (is_storage_away_) find_storage();
        store(std::numeric_limits<int>::max());
        check_all_is_stored();
    }
    if (setup_.max_kv_events > 0) take_events();
}

}  // namespace swiftkv::fuzz
