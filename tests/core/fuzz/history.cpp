#include "history.h"

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <vector>

#include "bytes.h"
#include "simulated_engine.h"

namespace swiftkv::fuzz {

namespace {

constexpr int kVocabulary = 3;          // so few tokens that prompts have prefixes in common
constexpr size_t kMaxOperations = 200;  // longer histories find nothing that these do not

constexpr std::array kPolicies{SchedulingPolicy::kPriority, SchedulingPolicy::kHrrn, SchedulingPolicy::kSpf,
                               SchedulingPolicy::kFcfs};

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
    void add();
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
};

void History::operate() {
    const int operation = in_.between(0, 15);
    const size_t num_borrow = engine_.setup().borrow.size(), num_lend = engine_.setup().lend.size();
    const auto link_of = [&](size_t num_links) { return in_.next() % static_cast<int>(num_links); };
    switch (operation) {
        case 0:
        case 1:
            add();
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
        default:
            say("reset prefix cache");
            engine_.reset_prefix_cache();
    }
}

// A prompt, or one that continues another.
void History::add() {
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
    say("add", prompt.tokens.size(), "tokens, max_tokens", prompt.max_tokens, "flags", flags);
    engine_.add(prompt);
    prompts_.push_back(std::move(prompt.tokens));
}

// Until nothing is left to run; nothing is planned after the last commit.
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
                   << '\n';
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
               << limits.stream_buffers << std::endl;
    }
    History(in, *engine, trace).run();
    return true;
}

}  // namespace swiftkv::fuzz
