#include "scheduler_limits.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace swiftkv {

namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

int64_t blocks_of(const Link& link) {
    return int64_t{link.num_extents} * link.blocks_per_extent;
}

int64_t blocks_to_borrow(int group, const std::vector<Link>& borrow_links) {
    int64_t borrowed = 0;
    for (const Link& link : borrow_links)
        if (link.group == group) borrowed += blocks_of(link);
    return borrowed;
}

// Returns the number of blocks that one sequence can have if all links lend all they can (paper Eqs. 4 and 5).
int64_t blocks_with_lending(const GroupSpec& spec, int group, const std::vector<Link>& borrow_links) {
    const int64_t borrowed = blocks_to_borrow(group, borrow_links);
    const int64_t layer_blocks = int64_t{spec.num_blocks} * spec.num_layers;
    const int64_t staging = std::min(borrowed, layer_blocks);
    return staging + (layer_blocks - staging) / spec.num_layers;
}

void check_sizes(const SchedulerLimits& limits) {
    require(limits.block_size > 0 && limits.max_num_seqs > 0 && limits.max_num_batched_tokens > 0,
            "block_size, max_num_seqs and max_num_batched_tokens must be positive");
    require(limits.stream_buffers == 1 || limits.stream_buffers == 2, "stream_buffers must be 1 or 2");
    require(limits.retention_interval.value_or(limits.block_size) >= limits.block_size,
            "retention_interval must not be below block_size");
    require(limits.target_tpot_s.value_or(1) > 0, "target_tpot_s must be positive");
    require(limits.long_prefill_token_threshold.value_or(1) > 0 && limits.max_num_partial_prefills.value_or(1) > 0 &&
                limits.max_long_partial_prefills > 0,
            "long_prefill_token_threshold, max_num_partial_prefills and max_long_partial_prefills must be positive");
    if (const std::optional<PromptLookup>& lookup = limits.prompt_lookup)
        require(lookup->num_speculative_tokens > 0 && lookup->shortest > 0 && lookup->shortest <= lookup->longest,
                "num_speculative_tokens and prompt_lookup_min must be positive, and prompt_lookup_max not smaller than "
                "prompt_lookup_min");
    require(limits.max_model_len > 1, "max_model_len must leave room for a prompt and an answer");
}

void check_group(const GroupSpec& spec, const std::string& name) {
    require(spec.num_layers > 0 && spec.num_blocks > 0 && spec.window >= 0,
            name + " needs num_layers > 0, num_blocks > 0 and window >= 0");
    const int64_t layer_blocks = int64_t{spec.num_layers} * spec.num_blocks;
    require(layer_blocks <= kMaxInt32, name + " has more layer blocks than an int32 can count");
    int64_t pool_bytes = 0, end = 0;
    require(
        spec.layer_block_bytes >= 0 && spec.base_offset_bytes >= 0 &&
            !__builtin_mul_overflow(layer_blocks, spec.layer_block_bytes, &pool_bytes) &&
            !__builtin_add_overflow(pool_bytes, spec.base_offset_bytes, &end),
        name + " needs layer_block_bytes and base_offset_bytes that are not negative, and an end that an int64 holds");
    const HostChunks& host = spec.host;
    int end_of_host = 0;
    require(host.count >= 0 && (host.count == 0 || (host.first >= layer_blocks && host.stride >= spec.num_layers)),
            name + " needs chunks of host memory that hold a block each and lie beyond its pool");
    require(!__builtin_mul_overflow(host.stride, host.count, &end_of_host) &&
                !__builtin_add_overflow(host.first, end_of_host, &end_of_host),
            name + " has more layer blocks in host memory than an int32 can count");
    require(host.count == 0 || spec.window == 0, name + " has a window, and is not attended in host memory");
    require(spec.source.count >= 0 && spec.source.offset_bytes >= 0 && (spec.source.count == 0 || host.count == 0),
            name + " needs chunks of host memory to copy from, at no negative offset, unless it is attended there");
}

void check_link(const Link& link, const std::vector<GroupSpec>& groups) {
    const bool is_known = link.group >= 0 && link.group < static_cast<int>(groups.size());
    require(is_known && link.num_extents >= 0 && link.blocks_per_extent > 0,
            "a link needs a KV group, num_extents >= 0 and blocks_per_extent > 0");
}

void check_lend_link(const Link& link, const std::vector<GroupSpec>& groups) {
    const GroupSpec& spec = groups[link.group];
    require(blocks_of(link) <= spec.num_blocks, "a lend link has more extents than its group has blocks for");
    if (spec.blocks_per_extent == 0) return;
    require(link.group == 0 && link.blocks_per_extent % spec.blocks_per_extent == 0,
            "KV groups that share extents lend whole ones, in the name of the first group");
}

void check_borrow_link(const Link& link, const std::vector<GroupSpec>& groups) {
    const GroupSpec& spec = groups[link.group];
    require(spec.layer_block_bytes > 0 && link.extent_bytes > 0,
            "borrowing needs layer_block_bytes of the group and extent_bytes of the link");
    // An extent may be larger than the pool, whose product check_group() has checked: overflow is checked here.
    int64_t used_bytes = 0, link_bytes = 0, end = 0;
    require(!__builtin_mul_overflow(int64_t{link.blocks_per_extent} * spec.num_layers, spec.layer_block_bytes,
                                    &used_bytes) &&
                used_bytes <= link.extent_bytes,
            "a borrow link's extent_bytes must hold blocks_per_extent blocks of its group");
    require(link.base_offset_bytes >= 0 &&
                !__builtin_mul_overflow(int64_t{link.num_extents}, link.extent_bytes, &link_bytes) &&
                !__builtin_add_overflow(link_bytes, link.base_offset_bytes, &end),
            "a borrow link needs base_offset_bytes >= 0 and an end that an int64 holds");
}

// Returns the number of extents that one sequence needs if all links lend all they can.
int64_t extents_with_lending(const std::vector<GroupSpec>& groups, const SchedulerLimits& limits,
                             const std::vector<Link>& borrow_links) {
    const int64_t num_extents = groups[0].num_blocks / groups[0].blocks_per_extent;
    int64_t left = std::max<int64_t>(0, num_extents - limits.extents_for_windows(groups)), num_needed = 0;
    for (size_t g = 0; g < groups.size(); ++g) {
        const GroupSpec& spec = groups[g];
        const auto borrowed = static_cast<int>(blocks_to_borrow(static_cast<int>(g), borrow_links));
        const int staging = staging_extents(spec, borrowed, static_cast<int>(left));
        const int64_t staged = std::min<int64_t>(borrowed, int64_t{staging} * spec.blocks_per_extent * spec.num_layers);
        const int64_t here = std::max<int64_t>(0, limits.blocks_for_one_sequence(spec) - staged);
        num_needed += staging + extents_for(spec, static_cast<int>(here));
        left -= staging;
    }
    return num_needed;
}

// Throws unless all groups share equally many extents, which suffice for one sequence, or none shares any.
void check_house(const std::vector<GroupSpec>& groups, const SchedulerLimits& limits,
                 const std::vector<Link>& borrow_links) {
    const GroupSpec& first = groups[0];
    for (const GroupSpec& spec : groups) {
        require((spec.blocks_per_extent > 0) == (first.blocks_per_extent > 0) && spec.blocks_per_extent >= 0,
                "blocks_per_extent must be positive in every KV group, or 0 in every KV group");
        if (spec.blocks_per_extent == 0) continue;
        require(spec.num_blocks % spec.blocks_per_extent == 0 &&
                    spec.num_blocks / spec.blocks_per_extent == first.num_blocks / first.blocks_per_extent,
                "KV groups that share extents must have equally many of them");
    }
    if (first.blocks_per_extent == 0) return;
    const int64_t num_needed = extents_with_lending(groups, limits, borrow_links);
    const int num_extents = first.num_blocks / first.blocks_per_extent;
    require(num_needed <= num_extents, "the pool has " + std::to_string(num_extents) + " extents; one sequence of " +
                                           "max_model_len " + std::to_string(limits.max_model_len) + " needs " +
                                           std::to_string(num_needed));
}

// Throws unless an int32 can number all blocks and nodes. One link's blocks may fill an int64, so the sum is checked as
// it grows.
void check_count_of_blocks(const std::vector<GroupSpec>& groups, const std::vector<Link>& borrow_links) {
    int64_t total = 0;
    const auto count = [&](int64_t num_blocks) {
        total += num_blocks;
        require(total < kMaxInt32 / 2, "all groups and borrow links together have more blocks than an int32 can count");
    };
    for (const GroupSpec& spec : groups) count(spec.num_blocks);
    for (const Link& link : borrow_links) count(blocks_of(link));
}

}  // namespace

void check_setup(const std::vector<GroupSpec>& groups, const SchedulerLimits& limits,
                 const std::vector<Link>& lend_links, const std::vector<Link>& borrow_links) {
    require(!groups.empty(), "a scheduler needs at least one KV group");
    check_sizes(limits);
    const auto name = [](size_t g) { return "KV group " + std::to_string(g); };
    for (size_t g = 0; g < groups.size(); ++g) check_group(groups[g], name(g));
    for (const Link& link : lend_links) {
        check_link(link, groups);
        check_lend_link(link, groups);
    }
    for (const Link& link : borrow_links) {
        check_link(link, groups);
        check_borrow_link(link, groups);
    }
    check_count_of_blocks(groups, borrow_links);
    check_house(groups, limits, borrow_links);
    for (size_t g = 0; g < groups.size(); ++g) {
        const int needed = limits.blocks_for_one_sequence(groups[g]);
        const int64_t most = blocks_with_lending(groups[g], static_cast<int>(g), borrow_links);
        require(most >= needed, name(g) + " has " + std::to_string(most) + " blocks; one sequence of max_model_len " +
                                    std::to_string(limits.max_model_len) + " needs " + std::to_string(needed));
    }
}

int SchedulerLimits::blocks_for_one_sequence(const GroupSpec& spec) const {
    const int whole = ceil_div(max_model_len, block_size);
    if (spec.window == 0 || !enable_chunked_prefill) return whole;
    return static_cast<int>(std::min<int64_t>(whole, int64_t{tail_blocks(spec, block_size)} + 2));
}

int SchedulerLimits::extents_for_one_sequence(const GroupSpec& spec) const {
    return extents_for(spec, blocks_for_one_sequence(spec));
}

int64_t SchedulerLimits::extents_for_windows(const std::vector<GroupSpec>& groups) const {
    int64_t num_extents = 0;
    for (const GroupSpec& spec : groups)
        if (spec.window > 0 && spec.blocks_per_extent > 0) num_extents += extents_for_one_sequence(spec);
    return num_extents;
}

int SchedulerLimits::most_blocks_of_one_sequence(const GroupSpec& spec) const {
    const int whole = ceil_div(max_model_len, block_size);
    if (spec.window == 0 || !enable_chunked_prefill) return whole;
    const int64_t held = int64_t{tail_blocks(spec, block_size)} + ceil_div(max_num_batched_tokens, block_size) + 2;
    return static_cast<int>(std::min<int64_t>(whole, held));
}

}  // namespace swiftkv
