// The sizes that a scheduler is built for.
#pragma once

#include <optional>
#include <vector>

#include "drafting.h"
#include "types.h"

namespace swiftkv {

// The order of requests. kFcfs goes by arrival alone. All others go by priority first, and then
// - kPriority: by arrival;
// - kSpf: by the least left to compute;
// - kHrrn: by the highest response ratio;
// - kTurns: alternately by the least left to compute and by arrival;
// - kDeadline: by the earliest deadline.
enum class SchedulingPolicy : uint8_t { kFcfs, kPriority, kSpf, kHrrn, kTurns, kDeadline };

struct SchedulerLimits {
    int block_size;
    int max_num_seqs;
    int max_num_batched_tokens;
    int max_model_len;
    bool enable_prefix_caching;
    bool enable_chunked_prefill;
    int stream_buffers = 2;  // the most
    // The tokens between regular boundaries, whose sliding-window tails are kept while their room is not needed.
    std::optional<int> retention_interval = {};
    // The most seconds that a step with decodes should take, prompts included.
    std::optional<double> target_tpot_s = {};
    // The most tokens of one prompt in a step. A prompt that has more left to compute counts as long.
    std::optional<int> long_prefill_token_threshold = {};
    // The most prompts, and the most long ones, that are computed in part at once.
    std::optional<int> max_num_partial_prefills = {};
    int max_long_partial_prefills = 1;
    SchedulingPolicy policy = SchedulingPolicy::kPriority;
    std::optional<PromptLookup> prompt_lookup = {};  // nullopt: drafts come from set_draft() alone

    // The number of blocks that suffice for one sequence of max_model_len tokens. In a sliding-window group, if prompts
    // are split: its tail, one more, and one for the tokens that are computed, because chunks shrink to what fits.
    int blocks_for_one_sequence(const GroupSpec& spec) const;
    // The number of shared extents in which the sequence is sure to find these blocks: see extents_for().
    int extents_for_one_sequence(const GroupSpec& spec) const;
    // The number of shared extents that the windows of one sequence need. Nothing is staged in these.
    int64_t extents_for_windows(const std::vector<GroupSpec>& groups) const;
    // The most blocks that one sequence can hold. With that many, no chunk has to shrink.
    int most_blocks_of_one_sequence(const GroupSpec& spec) const;
};

// Throws std::invalid_argument unless there can be such a scheduler: no later sum or product overflows, and one
// sequence of max_model_len tokens fits the pools, at least if all links lend all they can.
void check_setup(const std::vector<GroupSpec>& groups, const SchedulerLimits& limits,
                 const std::vector<Link>& lend_links, const std::vector<Link>& borrow_links);

}  // namespace swiftkv
