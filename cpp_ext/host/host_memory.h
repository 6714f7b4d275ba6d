#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

namespace swiftkv {

using HostKey = std::array<std::byte, 32>;

// Has the values of swiftkv.storage.backend.Status.
enum class HostStatus : int { kOk = 0, kMissing = 1, kCorrupt = 2, kLate = 4 };

// The buffers of a reader or writer for an object's header and block, which are contiguous in the memory.
template <class Byte>
struct ObjectParts {
    std::span<Byte> header;
    std::span<Byte> block;

    size_t num_bytes() const { return header.size() + block.size(); }
};

struct LockTimeout : std::runtime_error {
    LockTimeout() : std::runtime_error("another process holds the lock of the host memory") {}
};

// Objects under keys in one mapping that several processes share. The least recently used objects are evicted. Any
// process may be killed at any moment: the objects that can be found afterwards were written whole.
//
// An object lies in a chain of chunks. One robust mutex guards all links between chunks; bytes are copied without it.
// The record of an object has its state and the generation of its chunks. If an object is evicted while a reader copies
// it, the reader sees another generation afterwards, and discards the copy. If the holder of the mutex dies, the next
// process that gets it rebuilds all links from the records, which are valid at every instruction.
//
// A writer that is stopped for longer than `kStaleNs` may lose its chunks, and still write to them when it continues.
// Only a checksum lets readers notice that. Any thread may call every method; deadlines are on CLOCK_MONOTONIC.
class HostMemory {
  public:
    struct Usage {
        uint32_t num_objects;
        uint64_t num_bytes;    // of the chunks that are taken
        uint64_t bound_bytes;  // of all chunks
        uint32_t num_repairs;  // how often the links were rebuilt because a process had died with the lock
    };

    // Lays out memory that is all zeros. Throws std::invalid_argument if not a single chunk fits.
    static void format(std::span<std::byte> memory, uint32_t chunk_bytes);
    // The number of chunks that fit into `num_bytes`, beside the header, the records and the buckets.
    static uint32_t num_chunks(uint64_t num_bytes, uint32_t chunk_bytes);

    // The memory must stay mapped. Throws std::invalid_argument if it is not laid out.
    explicit HostMemory(std::span<std::byte> memory);

    // All of these throw LockTimeout if they do not get the mutex by the deadline.
    std::vector<uint8_t> exists(std::span<const HostKey> keys, double deadline_s);
    HostStatus read(const HostKey& key, ObjectParts<std::byte> into, double deadline_s);
    HostStatus write(const HostKey& key, ObjectParts<const std::byte> source, double deadline_s);
    void drop(const HostKey& key, double deadline_s);
    Usage usage(double deadline_s);

  private:
    using Id = uint32_t;  // a chunk, or the object whose first chunk it is, counted from 1; 0: none

    enum State : uint32_t { kFree = 0, kWriting = 1, kReady = 2 };

    struct Header;
    struct Record;
    class Lock;

    struct Reservation {
        Id id;
        uint64_t tag;
        std::vector<Id> chunks;
    };

    Record& record(Id id) const;
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
    bool is_evictable(Id id) const;
    bool make_room(uint32_t num_chunks);
    Id take_chunk();
    std::optional<Reservation> reserve(const HostKey& key, uint64_t num_bytes);
    HostStatus publish(const Reservation& reserved);
    void repair();
    bool claim(Id id, std::vector<bool>& is_claimed) const;

    template <class Byte, class Copy>
    void for_each_piece(std::span<const Id> chunks, ObjectParts<Byte> parts, Copy copy) const;

    Header& header_;
    Record* const records_;
    Id* const buckets_;
    std::byte* const chunks_;
};

}  // namespace swiftkv
