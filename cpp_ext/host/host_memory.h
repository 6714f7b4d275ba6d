#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

namespace swiftkv {

using HostKey = std::array<std::byte, 32>;

// Has the values of swiftkv.storage.backend.Status.
enum class HostStatus : int { kOk = 0, kMissing = 1, kCorrupt = 2, kLate = 4 };

// The buffers of a reader or writer for an object's header and block.
template <class Byte>
struct ObjectParts {
    std::span<Byte> header;
    std::span<Byte> block;
};

struct LockTimeout : std::runtime_error {
    LockTimeout() : std::runtime_error("another process holds the lock of the host memory") {}
};

// Objects under keys in one mapping that several processes share. The least recently used objects are evicted. Any
// process may be killed at any moment: the objects that can be found afterwards were written whole.
//
// The block of an object lies in a chain of chunks, and its header in the record of the first chunk. One robust mutex
// guards all links between chunks; blocks are copied without it. The record of an object has its state and the
// generation of its chunks. If an object is evicted while a reader copies it, the reader sees another generation
// afterwards, and discards the copy. If the holder of the mutex dies, the next process that gets it rebuilds all links
// from the records, which are valid at every instruction.
//
// Each process that writes or pins is a member, with a number of its own. An object that lies in one chunk can be
// pinned, and then read where it lies: it is not evicted or overwritten before all members have given their pins back.
// The chunks of a writer and the pins of a member are taken away only when the member is released, after the death of
// its process. So a writer that was stopped for long never writes into chunks that others have meanwhile.
//
// Any thread may call every method; deadlines are on CLOCK_MONOTONIC.
class HostMemory {
  public:
    static constexpr uint32_t kMaxMembers = 64;
    static constexpr uint32_t kMaxHeaderBytes = 128;

    struct Usage {
        uint32_t num_objects;
        uint64_t num_bytes;    // of the chunks that are taken
        uint64_t bound_bytes;  // of all chunks
        uint32_t num_repairs;  // how often the links were rebuilt because a process had died with the lock
    };

    // Lays out memory that is all zeros. Throws std::invalid_argument if not a single chunk fits.
    static void format(std::span<std::byte> memory, uint32_t chunk_bytes);
    // The number of chunks that fit into `num_bytes`, beside the header, the records, the pins and the buckets.
    static uint32_t num_chunks(uint64_t num_bytes, uint32_t chunk_bytes);

    // The memory must stay mapped. Throws std::invalid_argument if it is not laid out, or there is no such member.
    HostMemory(std::span<std::byte> memory, uint32_t member);
    // Gives back the pins that are left.
    ~HostMemory();
    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;

    uint32_t chunk_bytes() const;
    uint32_t num_chunks() const;
    uint64_t chunks_offset_bytes() const;  // of the first chunk, in the memory

    // All of these throw LockTimeout if they do not get the mutex by the deadline. A block that is written by then can
    // be found once a later call of this object gets the mutex.
    std::vector<uint8_t> exists(std::span<const HostKey> keys, double deadline_s);
    HostStatus read(const HostKey& key, ObjectParts<std::byte> into, double deadline_s);
    HostStatus write(const HostKey& key, ObjectParts<const std::byte> source, double deadline_s);
    void drop(const HostKey& key, double deadline_s);
    Usage usage(double deadline_s);
    // Pins the objects that are there, have `num_bytes` and lie in one chunk each, unless too many chunks are pinned.
    // Returns the chunk of each, counted from 0, or -1 if it was not pinned. An object can be pinned several times.
    std::vector<int64_t> pin(std::span<const HostKey> keys, uint64_t num_bytes, double deadline_s);
    // Takes away all pins of a member whose process is dead, and evicts what it was writing. For the member of this
    // object, that process is the one before this: once this process has taken over, nothing happens any more. If the
    // deadline passes before that, the next call of this object that gets the mutex takes over first.
    void release_member(uint32_t member, double deadline_s);
    // Throws std::runtime_error unless links, counts and pins agree. No process may give back pins meanwhile.
    void check_invariants(double deadline_s);

    // These never wait for another process.
    void unpin(std::span<const uint32_t> chunks);
    // Gives back the pins that are left.
    void give_back();
    // The headers of pinned objects; none for an object that this process wrote or verified since it was written.
    std::vector<std::optional<std::span<const std::byte>>> headers(std::span<const uint32_t> chunks);
    void note_verified(std::span<const uint32_t> chunks);
    // The members that pin each chunk, one bit each.
    std::vector<uint64_t> pinned_by(std::span<const uint32_t> chunks) const;
    // A count that grows whenever a writer comes to a pinned object that it would have evicted.
    uint64_t num_wanted() const;

  private:
    using Id = uint32_t;  // a chunk, or the object whose first chunk it is, counted from 1; 0: none

    // A dropped object can no longer be found. It stays until nobody pins it.
    enum State : uint32_t { kFree = 0, kWriting = 1, kReady = 2, kDropped = 3 };

    struct Header;
    struct Record;
    class Lock;

    // The offsets of the parts of the memory.
    struct Layout {
        uint64_t records_at;
        uint64_t pins_at;
        uint64_t buckets_at;
        uint64_t chunks_at;
        uint64_t num_buckets;
    };

    struct Reservation {
        Id id;
        uint64_t tag;
        std::vector<Id> chunks;
    };

    // The part of a chunk's state that only this process knows.
    struct Local {
        uint64_t verified_tag = 0;  // the tag of the object that was written or verified here
        uint32_t num_pins = 0;
    };

    static Layout lay_out(uint64_t num_chunks, uint32_t chunk_bytes);
    static Header& opened(std::span<std::byte> memory);

    Record& record(Id id) const;
    std::atomic_ref<uint64_t> pins(Id id) const;
    std::span<std::byte> chunk(Id id) const;
    Id& bucket(const HostKey& key) const;
    uint32_t chunks_for(uint64_t num_bytes) const;

    Id find(const HostKey& key) const;
    std::vector<Id> chain(Id id) const;
    void touch(Id id);
    void append(Id id);
    void unlink(Id id);
    void enter(Id id);
    void leave(Id id);
    void evict(Id id);
    bool is_pinned(Id id) const;
    uint32_t num_pinned(uint32_t enough) const;
    bool make_room(uint32_t num_chunks);
    Id take_chunk();
    std::optional<Reservation> reserve(const HostKey& key, ObjectParts<const std::byte> source);
    HostStatus publish(const Reservation& reserved);
    void catch_up();
    void take_over();
    void release(uint32_t member);
    void repair();
    bool claim(Id id, std::vector<bool>& is_claimed) const;

    uint64_t own_bit() const { return uint64_t{1} << member_; }
    void count_own_pins(int32_t change);
    Id held(uint32_t chunk) const;

    template <class Byte, class Copy>
    void for_each_piece(std::span<const Id> chunks, std::span<Byte> block, Copy copy) const;

    Header& header_;
    const Layout layout_;
    Record* const records_;
    uint64_t* const pins_;
    Id* const buckets_;
    std::byte* const chunks_;

    const uint32_t member_;
    std::atomic<bool> is_release_due_ = false;
    std::mutex local_mutex_;  // guards what follows, and this member's pins; taken after the shared mutex
    std::vector<Local> local_;
    std::vector<Reservation> unpublished_;  // written, but the mutex was not to be had by the deadline
};

}  // namespace swiftkv
