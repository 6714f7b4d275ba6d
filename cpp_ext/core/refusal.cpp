#include "refusal.h"

#include <algorithm>

namespace swiftkv {

void Refusal::note(const Request& r, int num_running, int token_budget, Lack lack) {
    refused_.insert_or_assign(&r, Circumstances{cache_.room_version(lack.group), num_running, token_budget, lack});
}

// More running requests ask for more spare blocks, and fewer for as many less. Without a new room version, two things
// can change. Blocks that others take lessen the room. Blocks evicted from the match add as much to what must be
// computed as to the room; only in window groups may a shorter match need less, and that changes the version. Room in
// other groups does not help the group that is short. A request whose back is loading by now may need less.
// Requests of lower classes that leave give no more room than their blocks at the time and the blocks that they have
// taken since.
bool Refusal::still_holds(const Request& r, int num_running, int token_budget, bool may_displace) const {
    const auto found = refused_.find(&r);
    if (found == refused_.end()) return false;
    const auto& [version, num_running_then, budget_then, lack] = found->second;
    const int64_t growth = cache_.room_version(lack.group) - version + std::max(0, num_running_then - num_running);
    const int least_growth = may_displace ? lack.least_growth_if_displacing : lack.least_growth;
    return growth < (r.back_end > 0 ? std::min(1, least_growth) : least_growth) &&
           (lack.group != kNone || token_budget == budget_then);
}

// Keys are chained: a later block of `running` can only be one of the prompt's if the first new one is.
void Refusal::note_commit(const Request& running, int num_blocks) {
    const int first = running.table.num_committed;
    if (first >= num_blocks) return;
    std::erase_if(refused_, [&](const auto& refused) {
        const std::vector<BlockKey>& keys = refused.first->keys;
        return first < std::ssize(keys) && running.keys[first] == keys[first];
    });
}

}  // namespace swiftkv
