// The file has more than 400 lines because a process may die at any of them while it holds the mutex, and the next one
// repairs what it left: the code that changes the links and the code that repairs them must be read together.
#include "host_memory.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>
#include <numeric>
#include <string>
#include <system_error>

#include "../common/check.h"

namespace swiftkv {

namespace {

constexpr uint64_t kMagic = 0x32567453484b7753;  // "SwKHStV2"
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kStateBits = 2;
constexpr uint64_t kStateMask = (1 << kStateBits) - 1;

uint64_t now_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t{static_cast<uint64_t>(now.tv_sec)} * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

bool is_past(double deadline_s) {
    return static_cast<double>(now_ns()) * 1e-9 > deadline_s;
}

timespec to_timespec(double seconds) {
    const double whole = std::floor(std::clamp(seconds, 0.0, 1e12));
    return {static_cast<time_t>(whole), static_cast<long>(std::clamp((seconds - whole) * 1e9, 0.0, 999'999'999.0))};
}

// A number that no other process has had since the machine started, beside those that this one forks.
uint64_t this_process() {
    static const uint64_t since_ns = now_ns();
    return since_ns << 22 | static_cast<uint64_t>(getpid());  // Linux numbers processes with 22 bits
}

uint64_t round_up(uint64_t value, uint64_t unit) {
    return (value + unit - 1) / unit * unit;
}

// Keeps the compiler and the processor from moving writes past it, so that writes are in memory in order whenever the
// process is killed.
void keep_order() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace

// The state of the whole memory. In fresh memory all links and counts are zero, which means: empty.
struct HostMemory::Header {
    uint64_t magic;
    uint64_t num_bytes;
    uint32_t chunk_bytes;
    uint32_t num_chunks;
    uint64_t num_buckets;  // a power of two
    pthread_mutex_t mutex;
    // The mutex guards everything from here on. repair() makes it anew, except what does not depend on the links.
    Id oldest;
    Id newest;
    Id free;
    uint32_t num_free;   // in the list of `free`
    uint32_t num_begun;  // chunks that have ever been taken; the chunks after them are free and in no list
    uint32_t num_ready;
    uint32_t num_repairs;
    uint64_t num_uses;
    std::array<uint64_t, kMaxMembers> process_of;  // the process that has taken over each member
    // These are changed without the mutex, too.
    std::array<uint32_t, kMaxMembers> num_pinned_by;  // the chunks that each member pins; it may count one too many
    uint64_t num_wanted;
};

// The record of a chunk. The record of an object's first chunk describes the object; the others use only `next_chunk`.
struct HostMemory::Record {
    HostKey key;
    uint64_t num_bytes;  // of the block
    uint64_t used;       // a number that grows with each use
    uint64_t tag;        // generation and state
    Id next_chunk;
    Id next_in_bucket;
    Id older;
    Id newer;
    uint32_t owner;  // the member that wrote it
    uint32_t header_bytes;
    std::array<std::byte, kMaxHeaderBytes> header;

    uint64_t load_tag() const { return std::atomic_ref(const_cast<uint64_t&>(tag)).load(std::memory_order_acquire); }
    State state() const { return static_cast<State>(load_tag() & kStateMask); }
    std::span<const std::byte> sealed() const { return {header.data(), header_bytes}; }

    template <class Byte>
    bool fits(const ObjectParts<Byte>& parts) const {
        return header_bytes == parts.header.size() && num_bytes == parts.block.size();
    }

    void set_state(State state) {
        const uint64_t generation = (tag >> kStateBits) + (state == kFree ? 1 : 0);
        keep_order();
        std::atomic_ref(tag).store(generation << kStateBits | state, std::memory_order_release);
        keep_order();
    }
};

class HostMemory::Lock {
  public:
    Lock(HostMemory& memory, double deadline_s) : mutex_(&memory.header_.mutex) {
        const timespec until = to_timespec(deadline_s);
        const int code = pthread_mutex_clocklock(mutex_, CLOCK_MONOTONIC, &until);
        if (code == EOWNERDEAD) {
            memory.repair();
            pthread_mutex_consistent(mutex_);
        } else if (code == ETIMEDOUT) {
            throw LockTimeout();
        } else if (code != 0) {
            throw std::system_error(code, std::generic_category(), "the lock of the host memory");
        }
        memory.catch_up();
    }

    ~Lock() { pthread_mutex_unlock(mutex_); }

    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

  private:
    pthread_mutex_t* mutex_;
};

// Blocks are read where they lie, in units of a layer, whose size divides that of a chunk. So the chunks begin at a
// multiple of their size, which costs less than one chunk.
HostMemory::Layout HostMemory::lay_out(uint64_t num_chunks, uint32_t chunk_bytes) {
    Layout layout{};
    layout.num_buckets = std::bit_ceil(std::max<uint64_t>(num_chunks, 1));
    layout.records_at = round_up(sizeof(Header), kPageBytes);
    layout.pins_at = layout.records_at + num_chunks * sizeof(Record);
    layout.buckets_at = layout.pins_at + num_chunks * sizeof(uint64_t);
    layout.chunks_at = round_up(layout.buckets_at + layout.num_buckets * sizeof(Id), chunk_bytes);
    return layout;
}

uint32_t HostMemory::num_chunks(uint64_t num_bytes, uint32_t chunk_bytes) {
    if (chunk_bytes == 0) return 0;
    const auto fits = [&](uint64_t count) {
        return lay_out(count, chunk_bytes).chunks_at + count * chunk_bytes <= num_bytes;
    };
    uint64_t low = 0;
    uint64_t high = std::min<uint64_t>(num_bytes / chunk_bytes, UINT32_MAX - 1);
    while (low < high) {
        const uint64_t middle = low + (high - low + 1) / 2;
        if (fits(middle)) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return static_cast<uint32_t>(low);
}

void HostMemory::format(std::span<std::byte> memory, uint32_t chunk_bytes) {
    if (chunk_bytes == 0 || chunk_bytes % 64 != 0)
        throw std::invalid_argument("chunk_bytes: " + std::to_string(chunk_bytes) + " is not a multiple of 64");
    const uint32_t count = num_chunks(memory.size(), chunk_bytes);
    if (count == 0)
        throw std::invalid_argument("not one chunk of " + std::to_string(chunk_bytes) + " bytes fits into " +
                                    std::to_string(memory.size()) + " bytes");
    auto& header = *reinterpret_cast<Header*>(memory.data());
    header.num_bytes = memory.size();
    header.chunk_bytes = chunk_bytes;
    header.num_chunks = count;
    header.num_buckets = lay_out(count, chunk_bytes).num_buckets;
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&header.mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    keep_order();
    header.magic = kMagic;
}

HostMemory::Header& HostMemory::opened(std::span<std::byte> memory) {
    if (memory.size() < sizeof(Header)) throw std::invalid_argument("this memory is too small to have been laid out");
    auto& header = *reinterpret_cast<Header*>(memory.data());
    if (header.magic != kMagic || header.num_bytes != memory.size())
        throw std::invalid_argument("this memory was not laid out, or has another size");
    return header;
}

HostMemory::HostMemory(std::span<std::byte> memory, uint32_t member)
    : header_(opened(memory)),
      layout_(lay_out(header_.num_chunks, header_.chunk_bytes)),
      records_(reinterpret_cast<Record*>(memory.data() + layout_.records_at)),
      pins_(reinterpret_cast<uint64_t*>(memory.data() + layout_.pins_at)),
      buckets_(reinterpret_cast<Id*>(memory.data() + layout_.buckets_at)),
      chunks_(memory.data() + layout_.chunks_at),
      member_(member),
      local_(header_.num_chunks) {
    if (member >= kMaxMembers)
        throw std::invalid_argument("member: " + std::to_string(member) + " is not below " +
                                    std::to_string(kMaxMembers));
}

HostMemory::~HostMemory() {
    give_back();
}

void HostMemory::give_back() {
    const std::lock_guard local_lock(local_mutex_);
    for (uint32_t i = 0; i < local_.size(); ++i) {
        if (local_[i].num_pins == 0) continue;
        local_[i].num_pins = 0;
        pins(i + 1).fetch_and(~own_bit());
        count_own_pins(-1);
    }
}

uint32_t HostMemory::chunk_bytes() const {
    return header_.chunk_bytes;
}

uint32_t HostMemory::num_chunks() const {
    return header_.num_chunks;
}

uint64_t HostMemory::chunks_offset_bytes() const {
    return layout_.chunks_at;
}

HostMemory::Record& HostMemory::record(Id id) const {
    return records_[id - 1];
}

// The members that pin a chunk, one bit each. Bits are set under the mutex, and cleared without it.
std::atomic_ref<uint64_t> HostMemory::pins(Id id) const {
    return std::atomic_ref(pins_[id - 1]);
}

std::span<std::byte> HostMemory::chunk(Id id) const {
    return {chunks_ + uint64_t{id - 1} * header_.chunk_bytes, header_.chunk_bytes};
}

HostMemory::Id& HostMemory::bucket(const HostKey& key) const {
    uint64_t hash = 0;
    std::memcpy(&hash, key.data(), sizeof hash);  // a key is a hash already
    return buckets_[hash & (header_.num_buckets - 1)];
}

uint32_t HostMemory::chunks_for(uint64_t num_bytes) const {
    const uint64_t count = (num_bytes + header_.chunk_bytes - 1) / header_.chunk_bytes;
    return static_cast<uint32_t>(std::clamp<uint64_t>(count, 1, UINT32_MAX));
}

// ---- calls ----

std::vector<uint8_t> HostMemory::exists(std::span<const HostKey> keys, double deadline_s) {
    const Lock lock(*this, deadline_s);
    std::vector<uint8_t> is_there;
    is_there.reserve(keys.size());
    for (const HostKey& key : keys) is_there.push_back(find(key) != 0);
    return is_there;
}

HostStatus HostMemory::read(const HostKey& key, ObjectParts<std::byte> into, double deadline_s) {
    if (is_past(deadline_s)) return HostStatus::kLate;
    Id id = 0;
    uint64_t tag = 0;
    std::vector<Id> chunks;
    {
        const Lock lock(*this, deadline_s);
        id = find(key);
        if (id == 0) return HostStatus::kMissing;
        if (!record(id).fits(into)) return HostStatus::kCorrupt;
        touch(id);
        tag = record(id).load_tag();
        chunks = chain(id);
        std::ranges::copy(record(id).sealed(), into.header.begin());
    }
    for_each_piece(chunks, into.block, [](std::span<std::byte> mine, std::span<std::byte> shared) {
        std::memcpy(mine.data(), shared.data(), mine.size());
    });
    std::atomic_thread_fence(std::memory_order_acquire);
    return record(id).load_tag() == tag ? HostStatus::kOk : HostStatus::kMissing;
}

HostStatus HostMemory::write(const HostKey& key, ObjectParts<const std::byte> source, double deadline_s) {
    if (source.header.size() > kMaxHeaderBytes)
        throw std::invalid_argument("a header of " + std::to_string(source.header.size()) + " bytes: at most " +
                                    std::to_string(kMaxHeaderBytes) + " fit");
    if (is_past(deadline_s)) return HostStatus::kLate;
    std::optional<Reservation> reserved;
    {
        const Lock lock(*this, deadline_s);
        if (const Id id = find(key); id != 0) {
            if (record(id).fits(source)) {
                touch(id);
                return HostStatus::kOk;
            }
            if (is_pinned(id)) return HostStatus::kMissing;
            evict(id);
        }
        reserved = reserve(key, source);
    }
    if (!reserved) return HostStatus::kMissing;
    for_each_piece(reserved->chunks, source.block, [](std::span<const std::byte> mine, std::span<std::byte> shared) {
        std::memcpy(shared.data(), mine.data(), mine.size());
    });
    try {
        const Lock lock(*this, deadline_s);
        return publish(*reserved);
    } catch (const LockTimeout&) {
        const std::lock_guard local_lock(local_mutex_);
        unpublished_.push_back(*std::move(reserved));
        throw;
    }
}

void HostMemory::drop(const HostKey& key, double deadline_s) {
    const Lock lock(*this, deadline_s);
    const Id id = find(key);
    if (id == 0) return;
    if (is_pinned(id)) {
        leave(id);
        record(id).set_state(kDropped);
    } else {
        evict(id);
    }
}

HostMemory::Usage HostMemory::usage(double deadline_s) {
    const Lock lock(*this, deadline_s);
    const uint64_t taken = header_.num_begun - header_.num_free;
    return {header_.num_ready, taken * header_.chunk_bytes, uint64_t{header_.num_chunks} * header_.chunk_bytes,
            header_.num_repairs};
}

template <class Byte, class Copy>
void HostMemory::for_each_piece(std::span<const Id> chunks, std::span<Byte> block, Copy copy) const {
    for (const Id id : chunks) {
        const size_t length = std::min<size_t>(header_.chunk_bytes, block.size());
        copy(block.first(length), chunk(id).first(length));
        block = block.subspan(length);
    }
}

// ---- pins ----

// Three quarters of the chunks can be pinned; the others are left for writers.
std::vector<int64_t> HostMemory::pin(std::span<const HostKey> keys, uint64_t num_bytes, double deadline_s) {
    std::vector<int64_t> pinned(keys.size(), -1);
    const Lock lock(*this, deadline_s);
    const std::lock_guard local_lock(local_mutex_);
    const auto limit = static_cast<uint32_t>(uint64_t{header_.num_chunks} * 3 / 4);
    uint32_t num_before = num_pinned(limit - std::min<uint64_t>(limit, keys.size()));
    for (size_t i = 0; i < keys.size(); ++i) {
        const Id id = find(keys[i]);
        if (id == 0 || record(id).num_bytes != num_bytes || chunks_for(num_bytes) != 1) continue;
        if (!is_pinned(id)) {
            if (num_before >= limit) continue;
            ++num_before;
        }
        touch(id);
        pinned[i] = id - 1;
        if (local_[id - 1].num_pins++ > 0) continue;
        count_own_pins(1);  // before the bit is set, so that a kill leaves no bit without a count
        pins(id).fetch_or(own_bit());
    }
    return pinned;
}

void HostMemory::unpin(std::span<const uint32_t> chunks) {
    const std::lock_guard local_lock(local_mutex_);
    for (const uint32_t chunk : chunks) {
        const Id id = held(chunk);
        if (--local_[chunk].num_pins > 0) continue;
        pins(id).fetch_and(~own_bit());  // from now on the object may be evicted
        count_own_pins(-1);
    }
}

std::vector<std::optional<std::span<const std::byte>>> HostMemory::headers(std::span<const uint32_t> chunks) {
    const std::lock_guard local_lock(local_mutex_);
    std::vector<std::optional<std::span<const std::byte>>> found;
    found.reserve(chunks.size());
    for (const uint32_t chunk : chunks) {
        const Record& r = record(held(chunk));
        found.push_back(local_[chunk].verified_tag == r.load_tag() ? std::nullopt : std::optional(r.sealed()));
    }
    return found;
}

void HostMemory::note_verified(std::span<const uint32_t> chunks) {
    const std::lock_guard local_lock(local_mutex_);
    for (const uint32_t chunk : chunks) local_[chunk].verified_tag = record(held(chunk)).load_tag();
}

std::vector<uint64_t> HostMemory::pinned_by(std::span<const uint32_t> chunks) const {
    std::vector<uint64_t> members;
    for (const uint32_t chunk : chunks) {
        ensure(chunk < header_.num_chunks, "a chunk is one of the memory's");
        members.push_back(pins(chunk + 1).load());
    }
    return members;
}

uint64_t HostMemory::num_wanted() const {
    return std::atomic_ref(header_.num_wanted).load(std::memory_order_relaxed);
}

// The object in a chunk that this process has pinned.
HostMemory::Id HostMemory::held(uint32_t chunk) const {
    ensure(chunk < header_.num_chunks && local_[chunk].num_pins > 0, "a pin that is used or given back is held");
    return chunk + 1;
}

void HostMemory::count_own_pins(int32_t change) {
    std::atomic_ref(header_.num_pinned_by[member_]).fetch_add(static_cast<uint32_t>(change));
}

bool HostMemory::is_pinned(Id id) const {
    return pins(id).load() != 0;
}

// At least the number of pinned chunks, and exactly that number if it is more than `enough`. Chunks that several
// members pin make the difference: each member counts its own, so that a kill leaves no wrong sum for the others.
uint32_t HostMemory::num_pinned(uint32_t enough) const {
    uint64_t sum = 0;
    for (uint32_t& count : header_.num_pinned_by) sum += std::atomic_ref(count).load();
    if (sum <= enough) return static_cast<uint32_t>(sum);
    uint32_t exact = 0;
    for (Id id = 1; id <= header_.num_begun; ++id) exact += is_pinned(id);
    return exact;
}

// ---- under the lock ----

HostMemory::Id HostMemory::find(const HostKey& key) const {
    Id id = bucket(key);
    while (id != 0 && record(id).key != key) id = record(id).next_in_bucket;
    return id;
}

std::vector<HostMemory::Id> HostMemory::chain(Id id) const {
    std::vector<Id> chunks(chunks_for(record(id).num_bytes));
    for (Id& chunk : chunks) {
        chunk = id;
        id = record(id).next_chunk;
    }
    return chunks;
}

void HostMemory::touch(Id id) {
    unlink(id);
    append(id);
}

// Makes an object the newest one.
void HostMemory::append(Id id) {
    Record& r = record(id);
    r.used = ++header_.num_uses;
    r.older = header_.newest;
    r.newer = 0;
    (header_.newest == 0 ? header_.oldest : record(header_.newest).newer) = id;
    header_.newest = id;
}

void HostMemory::unlink(Id id) {
    const Record& r = record(id);
    (r.older == 0 ? header_.oldest : record(r.older).newer) = r.newer;
    (r.newer == 0 ? header_.newest : record(r.newer).older) = r.older;
}

void HostMemory::enter(Id id) {
    Id& first = bucket(record(id).key);
    record(id).next_in_bucket = first;
    first = id;
    ++header_.num_ready;
}

void HostMemory::leave(Id id) {
    Id* link = &bucket(record(id).key);
    while (*link != id) link = &record(*link).next_in_bucket;
    *link = record(id).next_in_bucket;
    --header_.num_ready;
}

// Evicts an object. It is marked free, with another generation, before another object can get any of its chunks.
void HostMemory::evict(Id id) {
    const std::vector<Id> chunks = chain(id);
    if (record(id).state() == kReady) leave(id);
    unlink(id);
    record(id).set_state(kFree);
    for (const Id chunk : chunks) {
        record(chunk).next_chunk = header_.free;
        header_.free = chunk;
        ++header_.num_free;
    }
}

// Evicts the oldest objects. Those that are pinned or being written are made the newest instead, and met again only
// after all others; each is met once at most. So this takes constant time in the long run.
bool HostMemory::make_room(uint32_t num_chunks) {
    const auto num_free = [&] { return header_.num_free + (header_.num_chunks - header_.num_begun); };
    const Id last = header_.newest;
    Id id = header_.oldest;
    while (num_free() < num_chunks && id != 0) {
        const Id next = id == last ? 0 : record(id).newer;
        if (is_pinned(id)) {
            std::atomic_ref(header_.num_wanted).fetch_add(1, std::memory_order_relaxed);
            touch(id);
        } else if (record(id).state() == kWriting) {
            touch(id);
        } else {
            evict(id);
        }
        id = next;
    }
    return num_free() >= num_chunks;
}

HostMemory::Id HostMemory::take_chunk() {
    if (header_.free == 0) return ++header_.num_begun;
    const Id id = header_.free;
    header_.free = record(id).next_chunk;
    --header_.num_free;
    return id;
}

// Reserves chunks for a new object. It is in no bucket until publish(), so no reader finds it while it is written, and
// two processes may write the same key.
std::optional<HostMemory::Reservation> HostMemory::reserve(const HostKey& key, ObjectParts<const std::byte> source) {
    const uint32_t needed = chunks_for(source.block.size());
    if (needed > header_.num_chunks || !make_room(needed)) return std::nullopt;
    std::vector<Id> chunks(needed);
    for (Id& chunk : chunks) chunk = take_chunk();
    for (uint32_t i = 0; i < needed; ++i) record(chunks[i]).next_chunk = i + 1 < needed ? chunks[i + 1] : 0;
    Record& r = record(chunks[0]);
    r.key = key;
    r.num_bytes = source.block.size();
    r.owner = member_;
    r.header_bytes = static_cast<uint32_t>(source.header.size());
    std::ranges::copy(source.header, r.header.begin());
    r.set_state(kWriting);
    append(chunks[0]);
    return Reservation{chunks[0], r.load_tag(), std::move(chunks)};
}

// Makes an object available whose bytes are written.
HostStatus HostMemory::publish(const Reservation& reserved) {
    Record& r = record(reserved.id);
    if (r.load_tag() != reserved.tag) return HostStatus::kMissing;  // this member was released
    if (find(r.key) != 0) {
        evict(reserved.id);  // another process has written the same key meanwhile
        return HostStatus::kOk;
    }
    r.set_state(kReady);
    enter(reserved.id);
    const std::lock_guard local_lock(local_mutex_);
    local_[reserved.id - 1].verified_tag = r.load_tag();
    return HostStatus::kOk;
}

// Does what this process could not do before, because it did not get the mutex by a deadline.
void HostMemory::catch_up() {
    if (is_release_due_.exchange(false)) take_over();
    std::vector<Reservation> unpublished;
    {
        const std::lock_guard local_lock(local_mutex_);
        unpublished.swap(unpublished_);
    }
    for (const Reservation& reserved : unpublished) publish(reserved);
}

// ---- after a death ----

void HostMemory::release_member(uint32_t member, double deadline_s) {
    if (member >= kMaxMembers) throw std::invalid_argument("member: there is no member " + std::to_string(member));
    if (member == member_) is_release_due_ = true;
    const Lock lock(*this, deadline_s);  // takes over, if that is due
    if (member != member_) release(member);
}

// Releases this object's member, unless that was done for this process before: another object of the process may pin
// and write by now.
void HostMemory::take_over() {
    if (header_.process_of[member_] == this_process()) return;
    release(member_);
    header_.process_of[member_] = this_process();
}

// Takes away a member's pins, and evicts what it was writing. If the process is killed here, the rest is found when
// the member is released again.
void HostMemory::release(uint32_t member) {
    for (Id id = 1; id <= header_.num_begun; ++id) {
        pins(id).fetch_and(~(uint64_t{1} << member));
        if (record(id).state() == kWriting && record(id).owner == member) evict(id);
    }
    std::atomic_ref(header_.num_pinned_by[member]).store(0);
}

// Keeps the objects whose chains are whole, in order of their last use, and makes all links anew. The process may be
// killed here too: of the objects that it keeps, this changes only the links. It leaves pins as they are: an object
// that is pinned has a whole chain.
void HostMemory::repair() {
    ++header_.num_repairs;
    header_.num_begun = std::min(header_.num_begun, header_.num_chunks);
    std::vector<bool> is_claimed(header_.num_begun + 1);
    std::vector<Id> kept;
    for (Id id = 1; id <= header_.num_begun; ++id) {
        if (record(id).state() == kFree) continue;
        if (claim(id, is_claimed)) {
            kept.push_back(id);
        } else {
            record(id).set_state(kFree);
        }
    }
    std::sort(kept.begin(), kept.end(), [&](Id a, Id b) { return record(a).used < record(b).used; });
    std::fill_n(buckets_, header_.num_buckets, Id{0});
    header_.oldest = header_.newest = header_.free = 0;
    header_.num_free = header_.num_ready = 0;
    for (const Id id : kept) {
        append(id);
        if (record(id).state() == kReady) enter(id);
    }
    for (Id id = header_.num_begun; id >= 1; --id) {
        if (is_claimed[id]) continue;
        record(id).next_chunk = header_.free;
        header_.free = id;
        ++header_.num_free;
    }
}

// Claims the chunks of an object; returns whether it has all of them for itself.
bool HostMemory::claim(Id first, std::vector<bool>& is_claimed) const {
    std::vector<Id> chunks;
    Id id = first;
    for (uint32_t left = chunks_for(record(first).num_bytes); left > 0; --left) {
        if (id == 0 || id > header_.num_begun || is_claimed[id]) break;
        if (id != first && record(id).state() != kFree) break;
        is_claimed[id] = true;
        chunks.push_back(id);
        id = record(id).next_chunk;
        if (left == 1 && id == 0) return true;
    }
    for (const Id chunk : chunks) is_claimed[chunk] = false;
    return false;
}

// ---- for tests ----

void HostMemory::check_invariants(double deadline_s) {
    const Lock lock(*this, deadline_s);
    uint64_t num_taken = 0;
    uint64_t num_ready = 0;
    uint64_t num_free = 0;
    uint64_t num_pins = 0;
    for (Id id = header_.oldest, older = 0; id != 0; older = id, id = record(id).newer) {
        const Record& r = record(id);
        check_that(r.state() != kFree && r.older == older, "the order of eviction has objects, and links both ways");
        check_that((find(r.key) == id) == (r.state() == kReady), "the objects that are ready are found, and no others");
        check_that(!is_pinned(id) || (r.state() != kWriting && chunks_for(r.num_bytes) == 1),
                   "a pin is of one whole chunk");
        num_taken += chain(id).size();
        num_ready += r.state() == kReady;
        num_pins += std::popcount(pins(id).load());
    }
    for (Id id = header_.free; id != 0; id = record(id).next_chunk) ++num_free;
    check_that(num_free == header_.num_free && num_taken + num_free == header_.num_begun, "free + taken = all");
    check_that(num_ready == header_.num_ready, "the objects that are ready are counted");
    const auto& counts = header_.num_pinned_by;
    check_that(num_pins == std::accumulate(counts.begin(), counts.end(), uint64_t{0}), "each member counts its pins");
    for (Id id = 1; id <= header_.num_chunks; ++id) num_pins -= std::popcount(pins(id).load());
    check_that(num_pins == 0, "only objects are pinned");
}

}  // namespace swiftkv
