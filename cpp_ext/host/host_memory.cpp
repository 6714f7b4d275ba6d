// The file has more than 400 lines because a process may die at any of them while it holds the mutex, and the next one
// repairs what it left: the code that changes the links and the code that repairs them must be read together.
#include "host_memory.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>
#include <string>
#include <system_error>

namespace swiftkv {

namespace {

constexpr uint64_t kMagic = 0x31567453484b7753;  // "SwKHStV1"
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kStaleNs = 10'000'000'000;
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
    // The mutex guards everything below. repair() makes it anew, except `num_begun` and `num_repairs`.
    Id oldest;
    Id newest;
    Id free;
    uint32_t num_free;   // in the list of `free`
    uint32_t num_begun;  // chunks that have ever been taken; the chunks after them are free and in no list
    uint32_t num_ready;
    uint32_t num_repairs;
    uint64_t num_uses;
};

// The record of a chunk. The record of an object's first chunk describes the object; the others use only `next_chunk`.
struct HostMemory::Record {
    HostKey key;
    uint64_t num_bytes;
    uint64_t used;      // a number that grows with each use
    uint64_t begun_ns;  // of writing
    uint64_t tag;       // generation and state
    Id next_chunk;
    Id next_in_bucket;
    Id older;
    Id newer;

    uint64_t load_tag() const { return std::atomic_ref(const_cast<uint64_t&>(tag)).load(std::memory_order_acquire); }
    State state() const { return static_cast<State>(load_tag() & kStateMask); }

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
    }

    ~Lock() { pthread_mutex_unlock(mutex_); }

    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

  private:
    pthread_mutex_t* mutex_;
};

namespace {

// The offsets of the parts of the memory.
struct Layout {
    uint64_t records_at;
    uint64_t buckets_at;
    uint64_t chunks_at;
    uint64_t num_buckets;
};

Layout lay_out(uint64_t header_bytes, uint64_t record_bytes, uint64_t num_chunks) {
    Layout layout{};
    layout.num_buckets = std::bit_ceil(std::max<uint64_t>(num_chunks, 1));
    layout.records_at = round_up(header_bytes, kPageBytes);
    layout.buckets_at = layout.records_at + num_chunks * record_bytes;
    layout.chunks_at = round_up(layout.buckets_at + layout.num_buckets * sizeof(uint32_t), kPageBytes);
    return layout;
}

}  // namespace

uint32_t HostMemory::num_chunks(uint64_t num_bytes, uint32_t chunk_bytes) {
    const auto fits = [&](uint64_t count) {
        return lay_out(sizeof(Header), sizeof(Record), count).chunks_at + count * chunk_bytes <= num_bytes;
    };
    uint64_t low = 0;
    uint64_t high = std::min<uint64_t>(num_bytes / std::max(chunk_bytes, 1u), UINT32_MAX - 1);
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
    header.num_buckets = lay_out(sizeof(Header), sizeof(Record), count).num_buckets;
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&header.mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    keep_order();
    header.magic = kMagic;
}

namespace {

std::byte* checked(std::span<std::byte> memory, uint64_t header_bytes) {
    if (memory.size() < header_bytes) throw std::invalid_argument("this memory is too small to have been laid out");
    return memory.data();
}

}  // namespace

HostMemory::HostMemory(std::span<std::byte> memory)
    : header_(*reinterpret_cast<Header*>(checked(memory, sizeof(Header)))),
      records_(reinterpret_cast<Record*>(memory.data() +
                                         lay_out(sizeof(Header), sizeof(Record), header_.num_chunks).records_at)),
      buckets_(reinterpret_cast<Id*>(memory.data() +
                                     lay_out(sizeof(Header), sizeof(Record), header_.num_chunks).buckets_at)),
      chunks_(memory.data() + lay_out(sizeof(Header), sizeof(Record), header_.num_chunks).chunks_at) {
    if (header_.magic != kMagic || header_.num_bytes != memory.size())
        throw std::invalid_argument("this memory was not laid out, or has another size");
}

HostMemory::Record& HostMemory::record(Id id) const {
    return records_[id - 1];
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
        if (record(id).num_bytes != into.num_bytes()) return HostStatus::kCorrupt;
        touch(id);
        tag = record(id).load_tag();
        chunks = chain(id);
    }
    for_each_piece(chunks, into, [](std::span<std::byte> mine, std::span<std::byte> shared) {
        std::memcpy(mine.data(), shared.data(), mine.size());
    });
    std::atomic_thread_fence(std::memory_order_acquire);
    return record(id).load_tag() == tag ? HostStatus::kOk : HostStatus::kMissing;
}

HostStatus HostMemory::write(const HostKey& key, ObjectParts<const std::byte> source, double deadline_s) {
    if (is_past(deadline_s)) return HostStatus::kLate;
    std::optional<Reservation> reserved;
    {
        const Lock lock(*this, deadline_s);
        if (const Id id = find(key); id != 0) {
            if (record(id).num_bytes == source.num_bytes()) {
                touch(id);
                return HostStatus::kOk;
            }
            evict(id);
        }
        reserved = reserve(key, source.num_bytes());
    }
    if (!reserved) return HostStatus::kMissing;
    for_each_piece(reserved->chunks, source, [](std::span<const std::byte> mine, std::span<std::byte> shared) {
        std::memcpy(shared.data(), mine.data(), mine.size());
    });
    const Lock lock(*this, deadline_s);
    return publish(*reserved);
}

void HostMemory::drop(const HostKey& key, double deadline_s) {
    const Lock lock(*this, deadline_s);
    if (const Id id = find(key); id != 0) evict(id);
}

HostMemory::Usage HostMemory::usage(double deadline_s) {
    const Lock lock(*this, deadline_s);
    const uint64_t taken = header_.num_begun - header_.num_free;
    return {header_.num_ready, taken * header_.chunk_bytes, uint64_t{header_.num_chunks} * header_.chunk_bytes,
            header_.num_repairs};
}

template <class Byte, class Copy>
void HostMemory::for_each_piece(std::span<const Id> chunks, ObjectParts<Byte> parts, Copy copy) const {
    std::span<Byte> left = parts.header;
    bool is_in_block = false;
    for (const Id id : chunks) {
        std::span<std::byte> room = chunk(id);
        while (!room.empty()) {
            if (left.empty()) {
                if (is_in_block) return;
                left = parts.block;
                is_in_block = true;
                continue;
            }
            const size_t length = std::min(room.size(), left.size());
            copy(left.first(length), room.first(length));
            left = left.subspan(length);
            room = room.subspan(length);
        }
    }
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

bool HostMemory::is_evictable(Id id) const {
    return record(id).state() == kReady || now_ns() > record(id).begun_ns + kStaleNs;
}

bool HostMemory::make_room(uint32_t num_chunks) {
    const auto num_free = [&] { return header_.num_free + (header_.num_chunks - header_.num_begun); };
    Id id = header_.oldest;
    while (num_free() < num_chunks && id != 0) {
        const Id newer = record(id).newer;
        if (is_evictable(id)) evict(id);
        id = newer;
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
std::optional<HostMemory::Reservation> HostMemory::reserve(const HostKey& key, uint64_t num_bytes) {
    const uint32_t needed = chunks_for(num_bytes);
    if (needed > header_.num_chunks || !make_room(needed)) return std::nullopt;
    std::vector<Id> chunks(needed);
    for (Id& chunk : chunks) chunk = take_chunk();
    for (uint32_t i = 0; i < needed; ++i) record(chunks[i]).next_chunk = i + 1 < needed ? chunks[i + 1] : 0;
    Record& r = record(chunks[0]);
    r.key = key;
    r.num_bytes = num_bytes;
    r.begun_ns = now_ns();
    r.set_state(kWriting);
    append(chunks[0]);
    return Reservation{chunks[0], r.load_tag(), std::move(chunks)};
}

HostStatus HostMemory::publish(const Reservation& reserved) {
    Record& r = record(reserved.id);
    if (r.load_tag() != reserved.tag) return HostStatus::kMissing;  // evicted: the write took too long
    if (find(r.key) != 0) {
        evict(reserved.id);  // another process has written the same key meanwhile
        return HostStatus::kOk;
    }
    r.set_state(kReady);
    enter(reserved.id);
    return HostStatus::kOk;
}

// ---- after a death ----

// Keeps the objects whose chains are whole, in order of their last use, and makes all links anew. The process may be
// killed here too: of the objects that it keeps, this changes only the links.
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

}  // namespace swiftkv
