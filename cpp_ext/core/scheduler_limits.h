// The sizes that a scheduler is built for.
#pragma once

#include <optional>
#include <vector>

#include "types.h"

namespace swiftkv {

// The order of requests. All but kFcfs obey priorities first, and then: arrival; the least left to compute; or the
// highest response ratio; or the earliest deadline.
enum class SchedulingPolicy : uint8_t { kFcfs, kPriority, kSpf, kHrrn, kDeadline };

struct SchedulerLimits {
    int block_size;
    int max_num_seqs;
    int max_num_batched_tokens;
    int max_model_len;
    bool enable_prefix_caching;
    bool enable_chunked_prefill;
    int stream_buffers = 2;  // at most
    // Tokens between boundaries whose sliding-window tails are kept while nobody needs their room.
    std::optional<int> retention_interval = {};
    // The seconds that a step with decodes should take at most, prompts included.
    std::optional<double> target_tpot_s = {};
    // The most tokens of one prompt in a step. A prompt that has more left to compute is long.
    std::optional<int> long_prefill_token_threshold = {};
    // The most prompts, and the most long ones, that are computed in part at once.
    std::optional<int> max_num_partial_prefills = {};
    int max_long_partial_prefills = 1;
    SchedulingPolicy policy = SchedulingPolicy::kPriority;

    // The blocks with which one sequence of max_model_len tokens gets to its end. In a sliding-window group that is its
    // tail, a block more, and one for what is computed: chunks shrink to what fits.
    int blocks_for_one_sequence(const GroupSpec& spec) const;
    // The extents that it needs for them where groups share extents; one more than would hold them, where there is a
    // part of another.
    int extents_for_one_sequence(const GroupSpec& spec) const;
    // How many extents of a shared pool the windows of one sequence need. Nothing is staged in these.
    int64_t extents_for_windows(const std::vector<GroupSpec>& groups) const;
    // The most blocks that one sequence holds, for which no chunk need shrink.
    int most_blocks_of_one_sequence(const GroupSpec& spec) const;
};

// Throws std::invalid_argument unless there can be such a scheduler: no later sum or product overflows, and one
// sequence of max_model_len tokens fits the pools, or what they and all links together can hold.
void check_setup(const std::vector<GroupSpec>& groups, const SchedulerLimits& limits,
                 const std::vector<Link>& lend_links, const std::vector<Link>& borrow_links);

}  // namespace swiftkv
