// Finds the prompts that an engine computes before one that arrives, if the order is by response ratio.
#pragma once

#include <span>

namespace swiftkv {

// A prompt on its way to its first token, or one that waits.
struct Racer {
    double num_left;   // tokens that must be computed, as far as the order knows
    double service_s;  // the time that takes
    double waited_s;
    bool has_begun = false;
    Racer* behind = nullptr;  // the next waiting prompt of its lane
};

// Simulates the prompts that an engine computes from `begins_s` on until `own`, which arrives now, would be next. No
// further prompt arrives. At the end, the `service_s` of the others is the time that each still needs. `others` are in
// the order of arrival.
//
// The prompts that have begun compete with the first waiting prompt of each lane, and the highest ratio of time waited
// to tokens left wins. As a prompt is computed, fewer of its tokens are left and its ratio rises ever faster: so it is
// interrupted soon, or not at all. Ratios are compared only between steps, each of which takes `step_s`.
void race(std::span<Racer> others, const Racer& own, double begins_s, double step_s);

}  // namespace swiftkv
