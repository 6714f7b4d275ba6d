// A list of the changes of the prefix index, for routers that send requests to the engine that has their prefix.
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
    bool has_tokens = false;  // the block is stored and its tokens are known: they are next in KvEvents::tokens
    bool is_first = false;
    BlockKey parent = {};
};

struct KvEvents {
    std::vector<KvEvent> events;
    std::vector<TokenId> tokens;
};

// A bounded list of events. While it is off, it costs one comparison for each change of the index.
class KvEventLog {
  public:
    // Keeps up to `max_events` events from now on. With one more, all are replaced by kCleared. A follower of the
    // events then knows too few blocks, but none that is gone.
    void enable(int max_events) { max_events_ = max_events; }
    bool is_on() const { return max_events_ > 0; }
    void stored(const BlockKey& key, int group, Place place, const BlockText& text);
    void removed(const BlockKey& key, int group, Place place);
    void cleared();
    // Remembers the text of a block until it has been loaded.
    void begin_load(int group, BlockId block, const BlockText& text);
    // Adds the event of a block that has been loaded for this key.
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
