// A list of what the prefix index has learnt and forgotten, for routers that send requests to where their prefix is.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "types.h"

namespace swiftkv {

// The tokens of a block and the key of the block before it; for a prompt's first block, the key of its namespace.
struct BlockText {
    std::span<const TokenId> tokens = {};  // empty: not known here
    BlockKey parent = {};
    bool is_first = false;
};

enum class KvEventKind : uint8_t { kStored, kRemoved, kCleared };

struct KvEvent {
    KvEventKind kind;
    Place place = Place::kLocal;
    int group = 0;
    BlockKey key = {};
    bool has_tokens = false;  // a stored block whose tokens are known; they are the next of KvEvents::tokens
    bool is_first = false;
    BlockKey parent = {};
};

struct KvEvents {
    std::vector<KvEvent> events;
    std::vector<TokenId> tokens;
};

// A bounded list of events. Off, it costs a comparison for each change of the index.
class KvEventLog {
  public:
    // From now on up to `max_events` are kept. One more, and all are replaced by kCleared: then a follower of the
    // events knows less than there is, but nothing that is not there.
    void enable(int max_events) { max_events_ = max_events; }
    bool is_on() const { return max_events_ > 0; }
    void stored(const BlockKey& key, int group, Place place, const BlockText& text);
    void removed(const BlockKey& key, int group, Place place);
    void cleared();
    // Remembers the text of a block until it has been loaded.
    void begin_load(int group, BlockId block, const BlockText& text);
    // Tells of a block that has been loaded, for the key that it was wanted for.
    void end_load(int group, BlockId block, const BlockKey& key);
    void forget_load(int group, BlockId block) { loading_.erase({group, block}); }
    KvEvents take() { return std::exchange(pending_, {}); }

  private:
    struct OwnedText {
        std::vector<TokenId> tokens;
        BlockKey parent;
        bool is_first;
    };
    void add(const KvEvent& event);

    int max_events_ = 0;
    KvEvents pending_;
    std::map<std::pair<int, BlockId>, OwnedText> loading_;
};

}  // namespace swiftkv
