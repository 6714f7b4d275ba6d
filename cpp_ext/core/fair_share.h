// Shares what an engine computes between flows, by weight.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace swiftkv {

// Counts what each flow (the requests of one tenant) has had, with virtual token counters (VTC, arXiv 2401.00588). A
// computed prompt token counts 1 and an answer token 2, each divided by the flow's weight. Of the waiting flows, the
// one with the lowest counter goes first. Flows within a slack of it count as equal, so that the policy orders their
// requests, and can put requests with the same prefix together.
class FairShare {
  public:
    static constexpr int kMaxFlows = 1024;
    static constexpr double kMinWeight = 0.01, kMaxWeight = 100;

    // Begins with flow 0, of weight 1. `slack_tokens`: the slack, in tokens of a flow with that weight.
    explicit FairShare(int slack_tokens)
        : slack_(slack_tokens * kUnit), credit_(kSlacksPerCredit * slack_), flows_(1) {}

    // Adds a flow, or sets its weight from now on.
    void know(int flow, double weight);
    // Whether there has been more than one flow. If not, nothing need be compared.
    bool is_shared() const { return flows_.size() > 1; }

    // Whether flow `a` has had so much more than flow `b` that its requests go after those of `b`.
    bool is_past(int a, int b) const { return is_past_counter(a, counter(b)); }
    bool is_past_counter(int flow, int64_t least) const { return counter(flow) - least >= slack_; }
    int64_t counter(int flow) const { return flows_[flow].counter; }

    void charge_prompt(int flow, int num_tokens) { charge(flow, num_tokens); }
    // Takes back a part of a charge: `num_tokens` tokens of a prompt are not computed after all.
    void refund_prompt(int flow, int num_tokens) { charge(flow, -num_tokens); }
    void charge_answer(int flow, int num_tokens) { charge(flow, kAnswerWeight * num_tokens); }
    // Notes that a flow begins to wait beside others whose lowest counter is `least`, and raises its counter to at most
    // one credit below theirs. So a flow that now and then sends less than its share goes before a flow that always
    // sends more, but no flow can save up its share over idle hours.
    void begin_waiting(int flow, int64_t least) {
        level_ = std::max(level_, least);
        flows_[flow].counter = std::max(flows_[flow].counter, level_ - credit_);
    }

  private:
    static constexpr int64_t kUnit = 1 << 16;  // a token of a flow with weight 1: counters are exact
    static constexpr int64_t kAnswerWeight = 2;
    static constexpr int64_t kSlacksPerCredit = 8;

    struct Flow {
        int64_t token_cost = kUnit;
        int64_t counter = 0;
    };

    void charge(int flow, int64_t num_tokens) { flows_[flow].counter += num_tokens * flows_[flow].token_cost; }

    int64_t slack_, credit_;
    int64_t level_ = 0;  // the largest `least` so far, so that flows which begin one after the other do not sink
    std::vector<Flow> flows_;
};

}  // namespace swiftkv
