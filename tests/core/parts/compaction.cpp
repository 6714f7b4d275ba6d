// Blocks that move within a pool whose extents groups share.
#include <array>

#include "blake3.h"
#include "parts.h"

namespace swiftkv::parts {

namespace {

constexpr int kWindow = 1;  // the group

// A pool of ten extents, each of one full-attention block or of two blocks of windows. Two more of the latter are
// borrowed.
struct SharedPool {
    SharedPool()
        : cache({GroupSpec{.num_layers = 2, .num_blocks = 10, .window = 0, .blocks_per_extent = 1},
                 GroupSpec{.num_layers = 1, .num_blocks = 20, .window = 4, .blocks_per_extent = 2}},
                kBlockSize, {}, {Link{kWindow, 1, 2}}) {
        cache.borrow(0, std::array{0});
    }

    // Computes the next block of a sequence, at which it can be found again.
    void grow(BlockTable& table, int seed) {
        const int num_blocks = table.num_committed + 1;
        EXPECT(cache.extend(table, num_blocks * kBlockSize, num_blocks * kBlockSize, {}));
        const std::vector<TokenId> text = tokens(num_blocks * kBlockSize, seed);
        std::vector<BlockKey> keys;
        extend_keys(keys, blake3({}), text, kBlockSize);
        cache.commit(table, keys, num_blocks, text, blake3({}));
        cache.keep_boundary(keys, num_blocks, Worth::kKept);
        cache.release_outside_window(table, num_blocks * kBlockSize);
    }

    KvCache cache;
    BlockTable first = cache.make_table(), long_one = cache.make_table(), last = cache.make_table(),
               other = cache.make_table();
};

}  // namespace

TEST(nothing_moves_to_where_a_step_copies_from) {
    SharedPool pool;
    pool.grow(pool.first, 1);
    for (int i = 0; i < 3; ++i) pool.grow(pool.long_one, 2);  // leaves its first window behind, beside that of `first`
    pool.grow(pool.last, 3);
    pool.grow(pool.other, 4);

    KvCache& cache = pool.cache;
    cache.begin_step();
    EXPECT(cache.extend(pool.last, 2 * kBlockSize, 2 * kBlockSize, {}));
    EXPECT(cache.spills(kWindow).size() == 1);  // the window that was left behind
    cache.release(pool.last);                   // who took its place is preempted in the same step

    // The windows of the first and the other one are alone in two extents, and would fit one.
    std::array<BlockTable*, 3> tables{&pool.first, &pool.long_one, &pool.other};
    const auto make_room = [&] { return cache.compact(pool.first, kBlockSize, 4 * kBlockSize, 0, tables); };
    EXPECT(!make_room());
    cache.settle();
    EXPECT(make_room());
    EXPECT(cache.local_moves().size() == 1);
}

}  // namespace swiftkv::parts
