#include "refusal.h"

namespace swiftkv {

void Refusal::note(const Request& r, int num_running, int token_budget, int short_group) {
    refused_.insert_or_assign(&r,
                              Circumstances{cache_.room_version(short_group), num_running, token_budget, short_group});
}

// More running requests ask for more spare blocks. Without a new room version, two things can change. Blocks that
// others take lessen the room. Blocks evicted from the match add as much to what must be computed as to the room; only
// in window groups may a shorter match need less, and that changes the version. Room in other groups does not help the
// group that is short.
bool Refusal::still_holds(const Request& r, int num_running, int token_budget) const {
    const auto found = refused_.find(&r);
    if (found == refused_.end()) return false;
    const Circumstances& then = found->second;
    return then.room_version == cache_.room_version(then.short_group) && num_running >= then.num_running &&
           (then.short_group != kNone || token_budget == then.token_budget);
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
