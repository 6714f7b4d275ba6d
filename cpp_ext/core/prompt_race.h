// Which prompts an engine computes before one that arrives, where the order is by response ratio.
#pragma once

#include <span>

namespace swiftkv {

// A prompt on its way to its first token, or one that waits.
struct Racer {
    double num_left;   // tokens that are to be computed, as far as the order knows
    double service_s;  // how long that takes
    double waited_s;
    bool has_begun = false;
    Racer* behind = nullptr;  // the next one of its lane that waits
};

// Plays in advance what an engine computes from `begins_s` on until `own`, which arrives now and last, would be next,
// if nobody else came. Leaves what is left then of the others' `service_s`. They are in the order in which they came.
//
// The prompts that have begun compete with the first one of each lane, and the highest ratio of waiting to what is left
// wins. While a prompt is computed, ever less of it is left and its ratio rises ever faster: so it is interrupted soon,
// or not at all. Ratios are compared between steps only, which take `step_s` each.
void race(std::span<Racer> others, const Racer& own, double begins_s, double step_s);

}  // namespace swiftkv
