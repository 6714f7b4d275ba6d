#include "kv_events.h"

namespace swiftkv {

void KvEventLog::stored(const BlockKey& key, int group, Place place, const BlockText& text) {
    add({.kind = KvEventKind::kStored,
         .place = place,
         .group = group,
         .key = key,
         .has_tokens = !text.tokens.empty(),
         .is_first = text.is_first,
         .parent = text.parent});
    pending_.tokens.insert(pending_.tokens.end(), text.tokens.begin(), text.tokens.end());
}

void KvEventLog::removed(const BlockKey& key, int group, Place place) {
    add({.kind = KvEventKind::kRemoved, .place = place, .group = group, .key = key});
}

void KvEventLog::cleared() {
    pending_ = {};
    pending_.events.push_back({.kind = KvEventKind::kCleared});
}

void KvEventLog::add(const KvEvent& event) {
    if (static_cast<int>(pending_.events.size()) >= max_events_) cleared();
    pending_.events.push_back(event);
}

void KvEventLog::begin_load(int group, BlockId block, const BlockText& text) {
    loading_[{group, block}] = {{text.tokens.begin(), text.tokens.end()}, text.parent, text.is_first};
}

void KvEventLog::end_load(int group, BlockId block, const BlockKey& key) {
    const auto found = loading_.extract({group, block});
    if (found.empty()) {
        stored(key, group, Place::kLocal, {});
    } else {
        const OwnedText& text = found.mapped();
        stored(key, group, Place::kLocal, {text.tokens, text.parent, text.is_first});
    }
}

}  // namespace swiftkv
