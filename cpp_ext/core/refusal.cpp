#include "refusal.h"

#include <algorithm>

namespace swiftkv {

void Refusal::note(const Request& r, int num_running, int token_budget, int short_group) {
    request_ = &r;
    room_version_ = cache_.room_version(short_group);
    num_running_ = num_running;
    token_budget_ = token_budget;
    short_group_ = short_group;
}

// More running requests ask for more spare blocks. Without a new room version, two things can change. Blocks that
// others take lessen the room. Blocks evicted from the match add as much to what must be computed as to the room; only
// in window groups may a shorter match need less, and that changes the version. Room in other groups does not help the
// group that is short.
bool Refusal::still_holds(const Request& r, int num_running, int token_budget) const {
    return request_ == &r && room_version_ == cache_.room_version(short_group_) && num_running >= num_running_ &&
           (short_group_ != kNone || token_budget == token_budget_);
}

// Keys are chained: a later block of `running` can only be one of the prompt's if the first new one is.
void Refusal::note_commit(const Request& running, int num_blocks) {
    if (!request_) return;
    const int first = running.table.num_committed;
    const int end = std::min(num_blocks, static_cast<int>(request_->keys.size()));
    if (first < end && running.keys[first] == request_->keys[first]) forget();
}

void Refusal::forget(const Request& r) {
    if (request_ == &r) forget();
}

}  // namespace swiftkv
