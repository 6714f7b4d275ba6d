#include "request.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "fair_share.h"

namespace swiftkv {

bool are_tokens(std::span<const TokenId> ids) {
    return std::none_of(ids.begin(), ids.end(), [](TokenId id) { return id < 0; });
}

void check_request(const NewRequest& n, const SchedulerLimits& limits) {
    const std::string name = "request " + std::to_string(n.id);
    if (n.prompt.empty()) throw std::invalid_argument(name + " has an empty prompt");
    if (n.prompt.size() >= static_cast<size_t>(limits.max_model_len))
        throw std::invalid_argument(name + " has a prompt of " + std::to_string(n.prompt.size()) +
                                    " tokens; with max_model_len " + std::to_string(limits.max_model_len) +
                                    " at most " + std::to_string(limits.max_model_len - 1) +
                                    " leave room for an answer");
    if (!are_tokens(n.prompt)) throw std::invalid_argument(name + " has a prompt with a token id below 0");
    if (n.max_tokens < 1) throw std::invalid_argument(name + " has max_tokens < 1");
    if (n.min_tokens < 0) throw std::invalid_argument(name + " has min_tokens < 0");
    if (n.flow < 0 || n.flow >= FairShare::kMaxFlows)
        throw std::invalid_argument(name + " has a flow that is not from 0 to " +
                                    std::to_string(FairShare::kMaxFlows - 1));
    if (!(n.flow_weight >= FairShare::kMinWeight && n.flow_weight <= FairShare::kMaxWeight))
        throw std::invalid_argument(name + " has a flow_weight that is not from 0.01 to 100");
}

std::unique_ptr<Request> make_request(const NewRequest& n, const SchedulerLimits& limits) {
    const int prompt_len = static_cast<int>(n.prompt.size());
    auto r = std::make_unique<Request>(Request{
        .id = n.id,
        .priority = limits.policy == SchedulingPolicy::kFcfs ? 0 : n.priority,
        .arrival_s = n.arrival_s,
        .deadline_s = n.deadline_s,
        .flow = n.flow,
        .prompt_len = prompt_len,
        .last_len = prompt_len + std::min(n.max_tokens, limits.max_model_len - prompt_len),
        .min_tokens = n.min_tokens,
        .skip_prefix_match = n.skip_prefix_match,
        .stop_token_ids = {n.stop_token_ids.begin(), n.stop_token_ids.end()},
        .tokens = {n.prompt.begin(), n.prompt.end()},
    });
    if (limits.enable_prefix_caching) r->root_key = blake3(n.cache_namespace);
    r->extend_keys(limits);
    return r;
}

void Request::extend_keys(const SchedulerLimits& limits) {
    if (limits.enable_prefix_caching) swiftkv::extend_keys(keys, root_key, tokens, limits.block_size);
}

FinishReason Request::append(TokenId token, const SchedulerLimits& limits) {
    tokens.push_back(token);
    draft.clear();
    const bool may_stop = num_known() - prompt_len >= min_tokens;
    if (may_stop && std::find(stop_token_ids.begin(), stop_token_ids.end(), token) != stop_token_ids.end())
        return FinishReason::kStop;
    if (num_known() >= last_len) return FinishReason::kLength;
    extend_keys(limits);
    return FinishReason::kRunning;
}

}  // namespace swiftkv
