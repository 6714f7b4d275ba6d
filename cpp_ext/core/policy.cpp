#include "policy.h"

#include <algorithm>
#include <tuple>

#include "../common/check.h"

namespace swiftkv {

bool Policy::Order::operator()(const Request* a, const Request* b) const {
    return std::tie(a->priority, a->arrival) < std::tie(b->priority, b->arrival);
}

bool Policy::is_prefix_coming(const Request& r, Running running) const {
    const int max_match = r.skip_prefix_match ? 0 : r.max_match_blocks(limits_.block_size);
    if (cache_.is_loading(std::span(r.keys).first(max_match))) return true;
    return std::any_of(running.begin(), running.end(), [&](const Request* other) {
        if (other->skip_prefix_match) return false;
        const int next = other->num_computed / limits_.block_size;
        // Keys are chained: equal here means equal before.
        return next < std::min(max_match, static_cast<int>(other->keys.size())) && other->keys[next] == r.keys[next];
    });
}

bool Policy::could_hold(const Request& r) const {
    for (int g = 0; g < cache_.num_groups(); ++g) {
        const int whole = ceil_div(r.num_tokens(), limits_.block_size);
        if (!cache_.could_hold(g, std::min(whole, limits_.blocks_for_one_sequence(cache_.spec(g))))) return false;
    }
    return true;
}

bool Policy::is_oversized(const Request& r) const {
    return !splits_prompts() && r.num_tokens() > token_budget();
}

Request& Policy::victim(Running running) const {
    ensure(!running.empty(), "who needs room runs");
    return *running.back();
}

int Policy::first_chunk(const Request& r, int budget) const {
    return splits_prompts() ? std::min(r.num_remaining(), budget) : r.num_remaining();
}

int Policy::draft_length(const Request& r, int most) const {
    if (r.num_planned() != r.num_known()) return 0;
    // Its row samples one token more than it has guesses.
    return std::max(0, std::min({static_cast<int>(r.draft.size()), most, r.last_len - r.num_known() - 1}));
}

int Policy::fitting_chunk(const Request& r, int wanted, int spare) const {
    if (!splits_prompts() || !cache_.has_windows()) return wanted;
    return cache_.window_room_end(r.table, r.num_planned() + wanted, spare) - r.num_planned();
}

int Policy::next_chunk(const Request& r, int budget) const {
    return std::min(r.num_remaining(), budget);
}

}  // namespace swiftkv
