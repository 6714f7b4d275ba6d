#include "blake3.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace swiftkv {
namespace {

static_assert(std::endian::native == std::endian::little, "messages are read as little-endian words");

constexpr size_t kBlockBytes = 64;
constexpr size_t kChunkBytes = 1024;

enum Flag : uint32_t {
    kChunkStart = 1,
    kChunkEnd = 2,
    kParent = 4,
    kRoot = 8,
    kKeyedHash = 16,
};

constexpr Hash kIv = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

// The message word that round r, of 7, uses at each place: the permutation of the specification, applied r times.
constexpr auto kSchedule = [] {
    constexpr std::array<uint8_t, 16> permutation = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    std::array<std::array<uint8_t, 16>, 7> rounds{};
    for (uint8_t i = 0; i < 16; ++i) rounds[0][i] = i;
    for (int r = 1; r < 7; ++r)
        for (int i = 0; i < 16; ++i) rounds[r][i] = rounds[r - 1][permutation[i]];
    return rounds;
}();

using Message = std::array<uint32_t, 16>;

[[gnu::always_inline]] inline void mix(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t x, uint32_t y) {
    a = a + x + b;
    d = std::rotr(d ^ a, 16);
    c = c + d;
    b = std::rotr(b ^ c, 12);
    a = a + y + b;
    d = std::rotr(d ^ a, 8);
    c = c + d;
    b = std::rotr(b ^ c, 7);
}

template <size_t R>
[[gnu::always_inline]] inline void round(uint32_t (&v)[16], const Message& m) {
    constexpr auto& s = kSchedule[R];
    mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
    mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
    mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
    mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
    mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
    mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
    mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
    mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
}

Hash compress(const Hash& cv, const Message& m, uint64_t counter, uint32_t length, uint32_t flags) {
    uint32_t v[16] = {
        cv[0],
        cv[1],
        cv[2],
        cv[3],
        cv[4],
        cv[5],
        cv[6],
        cv[7],
        kIv[0],
        kIv[1],
        kIv[2],
        kIv[3],
        static_cast<uint32_t>(counter),
        static_cast<uint32_t>(counter >> 32),
        length,
        flags,
    };
    [&]<size_t... R>(std::index_sequence<R...>) { (round<R>(v, m), ...); }(std::make_index_sequence<7>{});
    Hash out;
    for (int i = 0; i < 8; ++i) out[i] = v[i] ^ v[i + 8];
    return out;
}

Hash hash_chunk(const Hash& key, std::span<const uint8_t> chunk, uint64_t index, uint32_t flags) {
    Hash cv = key;
    size_t at = 0;
    do {
        const size_t length = std::min(kBlockBytes, chunk.size() - at);
        Message m{};
        if (length > 0) std::memcpy(m.data(), chunk.data() + at, length);
        uint32_t block_flags = flags & ~kRoot;
        if (at == 0) block_flags |= kChunkStart;
        if (at + length == chunk.size()) block_flags |= kChunkEnd | (flags & kRoot);
        cv = compress(cv, m, index, static_cast<uint32_t>(length), block_flags);
        at += length;
    } while (at < chunk.size());
    return cv;
}

// Hashes a subtree. Its left side is the largest power of two of whole chunks that leaves something for the right.
Hash hash_subtree(const Hash& key, std::span<const uint8_t> input, uint64_t first_chunk, uint32_t flags) {
    if (input.size() <= kChunkBytes) return hash_chunk(key, input, first_chunk, flags);
    const size_t left_chunks = std::bit_floor((input.size() - 1) / kChunkBytes);
    const size_t left_bytes = left_chunks * kChunkBytes;
    const uint32_t inner = flags & ~kRoot;
    const Hash left = hash_subtree(key, input.first(left_bytes), first_chunk, inner);
    const Hash right = hash_subtree(key, input.subspan(left_bytes), first_chunk + left_chunks, inner);
    Message m;
    std::copy(left.begin(), left.end(), m.begin());
    std::copy(right.begin(), right.end(), m.begin() + 8);
    return compress(key, m, 0, kBlockBytes, flags | kParent);
}

}  // namespace

Hash blake3(std::span<const uint8_t> input) {
    return hash_subtree(kIv, input, 0, kRoot);
}

Hash blake3_keyed(const Hash& key, std::span<const uint8_t> input) {
    return hash_subtree(key, input, 0, kRoot | kKeyedHash);
}

}  // namespace swiftkv
