#include "history.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <vector>

#include "bytes.h"
#include "simulated_engine.h"

namespace swiftkv::fuzz {

namespace {

constexpr int kVocabulary = 3;          // few tokens, so that prompts have common prefixes
constexpr size_t kMaxOperations = 200;  // longer histories find nothing that these do not

// The number of operations of a plain engine; of one that also has storage, pins and tenants; and of one whose storage
// also goes and comes.
constexpr int kNumOperations = 16, kNumOperationsWithParts = 24, kNumOperationsWithChanges = 29;

// The number of each group's blocks in an extent that the groups share.
const std::vector<std::vector<int>> kBlocksPerExtent{{1, 2}, {2, 1}, {2, 3}, {3, 1}, {3, 2}, {4, 1}, {1, 1}, {1, 2, 2}};

constexpr std::array kPolicies{SchedulingPolicy::kPriority, SchedulingPolicy::kHrrn, SchedulingPolicy::kSpf,
                               SchedulingPolicy::kFcfs, SchedulingPolicy::kTurns};

// Makes two or three groups share extents. An extent has the same number of bytes in every group.
void share_extents(Setup& setup, Bytes& in) {
    const std::vector<int>& sizes = kBlocksPerExtent[in.next() % kBlocksPerExtent.size()];
    int num_layers = in.between(1, 2);  // of an extent
    for (const int size : sizes) num_layers = std::lcm(num_layers, size);
    const int num_extents = in.between(4, 12);
    setup.groups.resize(sizes.size(), {.num_layers = 0, .num_blocks = 0, .window = in.between(0, 9)});
    for (size_t g = 0; g < sizes.size(); ++g) {
        GroupSpec& group = setup.groups[g];
        group.num_layers = num_layers / sizes[g];
        group.num_blocks = num_extents * sizes[g];
        group.blocks_per_extent = sizes[g];
    }
    for (Link& link : setup.borrow) link.group = in.between(0, static_cast<int>(sizes.size()) - 1);
    for (Link& link : setup.lend) {
        const int per_extent = link.blocks_per_extent;
        link = {.group = 0, .num_extents = num_extents / per_extent, .blocks_per_extent = per_extent * sizes[0]};
    }
}

// Reads the parts of a setup that only some engines have.
void read_parts(Setup& setup, Bytes& in) {
    const int flags = in.next();
    setup.write_policy = flags & 1 ? WritePolicy::kWriteThroughSelective : WritePolicy::kWriteThrough;
    if (flags & 16) setup.write_policy = WritePolicy::kWriteBack;
    if (flags & 2) share_extents(setup, in);
    if (flags & 4) setup.limits.retention_interval = 2 * setup.limits.block_size;
    setup.is_changing = flags & 32;
    if (flags & 64) setup.max_kv_events = 1 << in.between(1, 9);
}

Setup read_setup(Bytes& in) {
    Setup setup;
    const int block_size = 1 << in.between(0, 2);
    const int num_groups = in.between(0, 3) == 0 ? 2 : 1;
    for (int g = 0; g < num_groups; ++g) {
        const int window = in.between(0, 3) == 0 ? in.between(1, 9) : 0;
        setup.groups.push_back({.num_layers = in.between(1, 4), .num_blocks = in.between(2, 12), .window = window});
    }
    for (int n = in.between(0, 3); n > 0; --n) {
        setup.borrow.push_back({.group = in.between(0, num_groups - 1),
                                .num_extents = in.between(1, 8),
                                .blocks_per_extent = in.between(1, 3)});
        setup.waste_bytes.push_back(in.between(0, 1) * 40);
    }
    for (int n = in.between(0, 2); n > 0; --n) {
        const int group = in.between(0, num_groups - 1), per_extent = in.between(1, 3);
        setup.lend.push_back({.group = group,
                              .num_extents = setup.groups[group].num_blocks / per_extent,
                              .blocks_per_extent = per_extent});
    }
    const int flags = in.next();
    setup.limits = {.block_size = block_size,
                    .max_num_seqs = in.between(1, 5),
                    .max_num_batched_tokens = in.between(1, 32),
                    .max_model_len = block_size * in.between(1, 12) + in.between(0, 3) + 1,
                    .enable_prefix_caching = (flags & 7) != 0,
                    .enable_chunked_prefill = (flags & 8) == 0,
                    .stream_buffers = flags & 16 ? 1 : 2,
                    .policy = kPolicies[(flags >> 5) % kPolicies.size()]};
    if (flags & 128) read_parts(setup, in);
    return setup;
}

class History {
  public:
    History(Bytes in, SimulatedEngine& engine, std::ostream* trace) : in_(in), engine_(engine), trace_(trace) {}

    void run() {
        for (size_t i = 0; i < kMaxOperations && !in_.empty(); ++i) {
            operate();
            engine_.check();
        }
        if (trace_) *trace_ << "drain\n";
        engine_.drain();
    }

  private:
    void operate();
    int num_operations() const;
    void operate_parts(int operation);
    void operate_changes(int operation);
    std::span<const TokenId> read_prefix(size_t prompt);
    void add(bool is_held);
    void pin();
    void finish();

    template <class... Words>
    void say(const Words&... words) {
        if (!trace_) return;
        ((*trace_ << words << ' '), ...);
        *trace_ << std::endl;
    }

    Bytes in_;
    SimulatedEngine& engine_;
    std::ostream* trace_;
    std::vector<std::vector<TokenId>> prompts_;
    std::vector<uint8_t> namespaces_;  // of each prompt
};

int History::num_operations() const {
    if (!engine_.setup().has_storage()) return kNumOperations;
    return engine_.setup().is_changing ? kNumOperationsWithChanges : kNumOperationsWithParts;
}

void History::operate() {
    const int operation = in_.next() % num_operations();
    const size_t num_borrow = engine_.setup().borrow.size(), num_lend = engine_.setup().lend.size();
    const auto link_of = [&](size_t num_links) { return in_.next() % static_cast<int>(num_links); };
    switch (operation) {
        case 0:
        case 1:
            add(false);
            break;
        case 2:
            if (const std::vector<RequestId> ids = engine_.request_ids(); !ids.empty()) {
                const RequestId id = ids[in_.next() % ids.size()];
                say("abort", id);
                engine_.abort(id);
            }
            break;
        case 3:
            if (engine_.num_open() < 2) say("schedule", engine_.schedule() ? "" : "nothing");
            break;
        case 4:
            if (engine_.num_open() > 0) {
                const int broken = in_.next() - 250;  // a row without a token is rare
                say("commit", broken);
                engine_.commit(broken);
            }
            break;
        case 5:
        case 6:
            for (int n = in_.between(1, 8); n > 0 && engine_.num_open() < 2; --n) {
                const bool is_planned = engine_.schedule();
                const size_t ahead = operation == 6 && is_planned ? 1 : 0;
                say(ahead ? "step ahead" : "step", is_planned ? "" : "nothing");
                while (engine_.num_open() > ahead) engine_.commit();
            }
            break;
        case 7:
            finish();
            break;
        case 8:
            if (engine_.num_open() > 0) {
                const int num_events = in_.between(0, 20);
                say("abandon after", num_events);
                engine_.abandon(num_events);
            }
            break;
        case 9:
        case 10:
            if (num_borrow > 0) {
                const int link = link_of(num_borrow), first = in_.next(), count = in_.between(1, 4);
                say(operation == 9 ? "borrow" : "recall", "link", link, "first", first, "count", count);
                operation == 9 ? engine_.borrow(link, first, count) : engine_.recall(link, first, count);
            }
            break;
        case 11:
            say("take returned");
            engine_.take_returned();
            break;
        case 12:
            if (num_borrow > 0) {
                const int link = link_of(num_borrow);
                say("lose", link);
                engine_.lose(link);
            }
            break;
        case 13:
            if (num_lend > 0) {
                const int link = link_of(num_lend), count = in_.between(1, 4);
                say("lend", "link", link, "count", count);
                engine_.lend(link, count);
            }
            break;
        case 14:
            if (num_lend > 0) {
                const int link = link_of(num_lend), first = in_.next(), count = in_.between(1, 4);
                say("take back", "link", link, "first", first, "count", count);
                engine_.take_back(link, first, count);
            }
            break;
        case 15:
            say("reset prefix cache");
            engine_.reset_prefix_cache();
            break;
        default:
            operate_parts(operation);
    }
}

void History::operate_parts(int operation) {
    const std::vector<RequestId> held = engine_.held_ids();
    switch (operation) {
        case 16:
            add(true);
            break;
        case 17: {
            const int max_blocks = in_.next();
            say("store", max_blocks);
            engine_.store(max_blocks);
            break;
        }
        case 18:
            if (!held.empty()) {
                const RequestId id = held[in_.next() % held.size()];
                const int max_blocks = in_.next();
                say("load", id, "up to block", max_blocks);
                engine_.begin_load(id, max_blocks);
            }
            break;
        case 19:
            if (!held.empty()) {
                const RequestId id = held[in_.next() % held.size()];
                const int first = in_.between(0, 12);
                say("meet", id, "from block", first);
                engine_.meet(id, first);
            }
            break;
        case 20:
            if (engine_.num_transfers() > 0) {
                const int transfer = in_.next() % engine_.num_transfers(), num_blocks = in_.between(1, 8);
                const bool is_loaded = in_.next() < 224;
                say("read of transfer", transfer, "blocks", num_blocks, is_loaded ? "" : "in vain");
                engine_.read(transfer, num_blocks, is_loaded);
            }
            break;
        case 21:
            if (engine_.num_transfers() > 0) {
                const int transfer = in_.next() % engine_.num_transfers();
                say("give up transfer", transfer);
                engine_.give_up(transfer);
            }
            break;
        case 22:
            if (!held.empty()) {
                const RequestId id = held[in_.next() % held.size()];
                say("let go", id);
                engine_.let_go(id);
            }
            break;
        case 23:
            pin();
            break;
        default:
            operate_changes(operation);
    }
}

void History::operate_changes(int operation) {
    switch (operation) {
        case 24:
            if (engine_.is_storage_away()) {
                say("storage comes");
                engine_.find_storage();
            } else {
                const bool is_filled_before = in_.next() & 1;
                say("storage goes", is_filled_before ? "when it has all" : "");
                engine_.lose_storage(is_filled_before);
            }
            break;
        case 25:
            if (!prompts_.empty()) {
                const size_t prompt = in_.next() % prompts_.size();
                const std::span<const TokenId> prefix = read_prefix(prompt);
                const bool is_stored = in_.next() & 1;
                say("offer", prefix.size(), "tokens of prompt", prompt, is_stored ? "and store" : "");
                engine_.offer_prefix(prefix, namespaces_[prompt], is_stored);
            }
            break;
        case 26:
            if (!prompts_.empty()) {
                const size_t prompt = in_.next() % prompts_.size();
                const std::span<const TokenId> prefix = read_prefix(prompt);
                say("load the last block of", prefix.size(), "tokens of prompt", prompt);
                engine_.begin_loading(prefix, namespaces_[prompt]);
            }
            break;
        case 27:
            if (engine_.num_loads() > 0) {
                const int load = in_.next() % engine_.num_loads();
                const bool is_loaded = in_.next() < 224;
                say("end of load", load, is_loaded ? "" : "in vain");
                engine_.end_loading(load, is_loaded);
            }
            break;
        default:
            if (engine_.setup().max_kv_events > 0) {
                say("take events");
                engine_.take_events();
            }
    }
}

std::span<const TokenId> History::read_prefix(size_t prompt) {
    const std::vector<TokenId>& tokens = prompts_[prompt];
    return std::span(tokens).first(std::min<size_t>(tokens.size(), in_.next()));
}

// Pins a prefix of a prompt, or ends a pin.
void History::pin() {
    const int flags = in_.next();
    if (flags & 1) {
        if (!engine_.has_pins()) return;
        say("unpin", flags >> 1);
        engine_.unpin(flags >> 1);
    } else if (!prompts_.empty()) {
        const size_t prompt = in_.next() % prompts_.size();
        const double max_share = flags & 2 ? 1.0 : 0.5;
        say("pin prompt", prompt, "share", max_share);
        engine_.pin(prompts_[prompt], namespaces_[prompt], max_share);
    }
}

// Adds a request with a new prompt, or one that continues another.
void History::add(bool is_held) {
    const int flags = in_.next();
    Prompt prompt;
    if (!prompts_.empty() && (flags & 1)) {
        prompt.tokens = prompts_[in_.next() % prompts_.size()];
        prompt.tokens.resize(std::min<size_t>(prompt.tokens.size(), in_.next()));
    }
    const int num_new = in_.between(1, 48);
    uint32_t seed = in_.next();
    for (int i = 0; i < num_new; ++i) {
        seed = seed * 1664525 + 1013904223;
        prompt.tokens.push_back(static_cast<TokenId>((seed >> 16) % kVocabulary));
    }
    prompt.tokens.resize(std::min<size_t>(prompt.tokens.size(), engine_.setup().limits.max_model_len - 1));
    prompt.max_tokens = in_.between(1, 24);
    if (flags & 2) prompt.stop = static_cast<TokenId>(in_.between(0, kVocabulary - 1));
    if (flags & 4) prompt.min_tokens = in_.between(0, 4);
    prompt.cache_namespace = (flags & 24) == 24 ? 1 : 0;
    prompt.skip_prefix_match = (flags & 96) == 96;
    prompt.priority = (flags & 128) ? kPrioritiesPerClass : 0;
    prompt.flow = engine_.setup().has_storage() ? static_cast<int>(prompts_.size() % 2) : 0;
    prompt.is_held = is_held;
    say(is_held ? "add and hold" : "add", prompt.tokens.size(), "tokens, max_tokens", prompt.max_tokens, "flags",
        flags);
    engine_.add(prompt);
    prompts_.push_back(std::move(prompt.tokens));
    namespaces_.push_back(prompt.cache_namespace);
}

// Steps until nothing is left to run and no step is in progress.
void History::finish() {
    say("finish");
    while (engine_.num_open() > 0 || (!engine_.request_ids().empty() && engine_.schedule())) engine_.commit();
}

}  // namespace

bool run_history(std::span<const uint8_t> bytes, std::ostream* trace) {
    Bytes in(bytes);
    const Setup setup = read_setup(in);
    std::optional<SimulatedEngine> engine;
    try {
        engine.emplace(setup);
    } catch (const std::invalid_argument& error) {
        if (trace) *trace << "refused: " << error.what() << std::endl;
        return false;
    }
    if (trace) {
        for (const GroupSpec& g : setup.groups)
            *trace << "group of " << g.num_layers << " layers, " << g.num_blocks << " blocks, window " << g.window
                   << ", blocks per extent " << g.blocks_per_extent << '\n';
        for (const Link& l : setup.borrow)
            *trace << "borrows for group " << l.group << ", " << l.num_extents << " extents of " << l.blocks_per_extent
                   << " blocks\n";
        for (const Link& l : setup.lend)
            *trace << "lends of group " << l.group << ", " << l.num_extents << " extents of " << l.blocks_per_extent
                   << " blocks\n";
        const SchedulerLimits& limits = setup.limits;
        *trace << "block_size " << limits.block_size << ", max_num_seqs " << limits.max_num_seqs
               << ", max_num_batched_tokens " << limits.max_num_batched_tokens << ", max_model_len "
               << limits.max_model_len << ", enable_prefix_caching " << limits.enable_prefix_caching
               << ", enable_chunked_prefill " << limits.enable_chunked_prefill << ", stream_buffers "
               << limits.stream_buffers << ", storage " << setup.has_storage() << ", changing " << setup.is_changing
               << ", max_kv_events " << setup.max_kv_events << std::endl;
    }
    History(in, *engine, trace).run();
    return true;
}

}  // namespace swiftkv::fuzz
