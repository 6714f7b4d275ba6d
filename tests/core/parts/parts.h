// The parts of a scheduler without the scheduler, and a small framework to test them.
#pragma once

#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "admission_order.h"
#include "demand.h"
#include "fair_share.h"
#include "kv_cache.h"
#include "plan_writer.h"
#include "policy.h"
#include "refusal.h"
#include "request.h"
#include "roster.h"
#include "scheduler_limits.h"
#include "step_builder.h"

namespace swiftkv::parts {

inline std::map<std::string, void (*)()>& tests() {
    static std::map<std::string, void (*)()> tests;
    return tests;
}

struct Registered {
    Registered(const char* name, void (*test)()) { tests()[name] = test; }
};

#define TEST(name)                                          \
    static void name();                                     \
    static const Registered registered_##name{#name, name}; \
    static void name()

#define EXPECT(...)                                                                                   \
    do {                                                                                              \
        if (!(__VA_ARGS__)) throw std::runtime_error(std::to_string(__LINE__) + ": " + #__VA_ARGS__); \
    } while (false)

constexpr int kBlockSize = 4;
constexpr SchedulerLimits kLimits{.block_size = kBlockSize,
                                  .max_num_seqs = 4,
                                  .max_num_batched_tokens = 16,
                                  .max_model_len = 64,
                                  .enable_prefix_caching = true,
                                  .enable_chunked_prefill = true};

// Returns `count` tokens; those of different seeds differ from the first on.
inline std::vector<TokenId> tokens(int count, int seed = 0) {
    std::vector<TokenId> ids(count);
    std::iota(ids.begin(), ids.end(), 1000 * seed);
    return ids;
}

// All parts of a scheduler. The tests do what the scheduler would do between two steps.
struct Parts {
    explicit Parts(int num_blocks, const SchedulerLimits& with = kLimits, std::vector<Link> borrow_links = {})
        : limits(with),
          cache({GroupSpec{.num_layers = 2, .num_blocks = num_blocks, .window = 0, .layer_block_bytes = 100}},
                with.block_size, {}, borrow_links),
          demand(cache, limits),
          order(make_order(with.policy)),
          shares(with.max_num_batched_tokens),
          roster(cache, demand, *order, shares, with.max_num_seqs),
          pins(cache),
          policy(cache, limits, step_time),
          refusal(cache),
          writer(cache, limits) {}
    Parts(const Parts&) = delete;
    Parts& operator=(const Parts&) = delete;

    Request& add(RequestId id, const std::vector<TokenId>& prompt, int64_t priority = 0, int flow = 0) {
        shares.know(flow, 1);
        roster.add(make_request({.id = id,
                                 .prompt = prompt,
                                 .max_tokens = 20,
                                 .min_tokens = 0,
                                 .stop_token_ids = {},
                                 .cache_namespace = {},
                                 .skip_prefix_match = false,
                                 .priority = priority,
                                 .flow = flow},
                                limits));
        return *roster.find(id);
    }

    StepBuilder begin_step(double now_s = 0.0) {
        cache.begin_step();
        return StepBuilder(cache, roster, pins, policy, *order, shares, alternation, refusal, now_s);
    }

    // Ends the step; each row that samples appends `token` to its request.
    void end_step(StepBuilder& step, TokenId token = 7) {
        for (StepRow& row : step.rows()) {
            EXPECT(row.draft.empty());
            Request& r = *row.request;
            r.is_in_step = false;
            r.num_computed += row.num_tokens;
            r.num_scheduled -= row.num_tokens;
            r.num_unknown -= row.samples;
            cache.commit(r.table, r.keys, r.num_computed / kBlockSize, r.tokens, r.root_key);
            if (row.samples) r.append(token, limits);
        }
        cache.settle();
    }

    SchedulerLimits limits;
    KvCache cache;
    Demand demand;
    std::unique_ptr<const AdmissionOrder> order;
    FairShare shares;
    Roster roster;
    Pins pins;
    StepTime step_time;
    Policy policy;
    Alternation alternation;
    Refusal refusal;
    PlanWriter writer;
};

// Returns the requests of a step's rows, with the number of tokens of each row.
inline std::vector<std::pair<RequestId, int>> rows_of(StepBuilder& step) {
    std::vector<std::pair<RequestId, int>> rows;
    for (const StepRow& row : step.rows()) rows.emplace_back(row.id, row.num_tokens);
    return rows;
}

using Rows = std::vector<std::pair<RequestId, int>>;

}  // namespace swiftkv::parts
