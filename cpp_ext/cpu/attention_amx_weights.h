#pragma once

// The weights of a block of rows, found a few keys at a time while tiles are multiplied. Include after simd_avx512.h;
// all of it has internal linkage.
#include "attention_bf16_dot.h"
#include "attention_keys.h"
#include "attention_softmax.h"

namespace swiftkv {
namespace {

constexpr int kStepKeys = 32;  // keys whose scores are found at once
constexpr int kMaxBlockRows = 32;

// Turns the scores of a block of rows into weights. The scores of a whole partition would go to the second-level cache
// and back, so only those of a few steps are kept, and a row's largest score is not known when its first scores are
// weighed. Weights are therefore relative to the largest score of the first step that the row sees: bfloat16 and float
// round numbers far above 1 as well as those below. Only if a sum comes near overflow, which does not happen in real
// models, the block passes twice more: to find the largest scores of such rows, and to weigh relative to them. All of
// this depends only on a row's own scores.
class StepWeights {
  public:
    static constexpr int kRingSteps = 4;  // the steps whose scores are kept: 16 KiB

    struct Scratch {
        float* ring;     // [kRingSteps, kMaxBlockRows, kStepKeys], of scores
        float* sums;     // [kMaxBlockRows, kLanes], of weights
        float* largest;  // [kMaxBlockRows], of scores, if the row's sum comes near overflow; else kLowest

        explicit Scratch(Arena& arena)
            : ring(arena.take<float>(kRingSteps * kMaxBlockRows * kStepKeys)),
              sums(arena.take<float>(kMaxBlockRows * Simd::kLanes)),
              largest(arena.take<float>(kMaxBlockRows)) {}
    };

    // `start` is the position of the partition's first key, `part` the block's. weights: [rows of the block,
    // kRowStride].
    StepWeights(const AttentionSpec& spec, const AttendTask& task, int start, const RowBlock& block,
                const Scratch& scratch, uint16_t* weights, const SoftmaxState& part)
        : spec_(spec),
          scratch_(scratch),
          weights_(weights),
          max_(part.max),
          sum_(part.sum),
          scale_(Rows::exponent_scale(spec)),
          num_rows_(block.end - block.begin),
          key_begin_(block.key_begin) {
        for (int row = 0; row < num_rows_; ++row) {
            const int query = task.first_position + (block.begin + row) / spec.group_size();
            lo_[row] = spec.first_visible(query) - start;
            hi_[row] = query + 1 - start;
            scratch.largest[row] = kLowest;
        }
        begin(Pass::kFirst);
    }

    // Returns the place for the scores of the next step, after it has weighed the scores that lay there.
    float* next_scores() {
        while (is_full()) weigh(num_rows_);
        return scores_of(scored_end_);
    }
    void scored() { ++scored_end_; }

    // Weighs a few rows, but not of the latest steps: scores that tiles have just stored cannot be loaded at once.
    void operator()() {
        if (is_full()) weigh(kRowsAtOnce);
    }

    // Ends a pass over the block's keys, all of which are scored; returns whether another pass is needed.
    bool end_pass() {
        while (step_ < scored_end_) weigh(num_rows_);
        if (pass_ == Pass::kFind) {
            begin(Pass::kLast);
            return true;
        }
        bool overflows = false;
        for (int row = 0; row < num_rows_; ++row) {
            sum_[row] = Simd::sum(Simd::load(scratch_.sums + row * Simd::kLanes));
            if (sum_[row] <= kLargestSum) continue;  // a NaN passes again, too
            overflows = true;
            scratch_.largest[row] = max_[row];
        }
        if (!overflows || pass_ == Pass::kLast) return false;
        begin(Pass::kFind);
        return true;
    }

  private:
    using E = BFloat16Dot;
    using V = Simd::V;
    using Rows = Softmax<E>;
    enum class Pass { kFirst, kFind, kLast };
    static constexpr int kRowsAtOnce = 4;        // they take about as long as a product of two by two tiles
    static constexpr float kLargestSum = 1e18f;  // up to it, the sum of a partition's weighted values is finite

    void begin(Pass pass) {
        pass_ = pass;
        step_ = scored_end_ = key_begin_ / kStepKeys;
        row_ = 0;
        for (int row = 0; row < num_rows_; ++row) {
            Simd::store(scratch_.sums + row * Simd::kLanes, Simd::zero());
            max_[row] = kLowest;
            shift_[row] = 0.0f;
            refer(row, scratch_.largest[row]);
        }
    }

    // Makes the weights of a row relative to `score`, if it saw a key.
    void refer(int row, float score) {
        if (score == kLowest) return;
        max_[row] = score;
        shift_[row] = E::kWeightShift - score * scale_;
    }

    bool is_full() const { return step_ + kRingSteps == scored_end_; }
    float* scores_of(int step) const { return scratch_.ring + step % kRingSteps * kMaxBlockRows * kStepKeys; }

    // Weighs up to `count` rows of the first step that is not weighed.
    [[gnu::noinline]] void weigh(int count) {
        const int end = smaller(row_ + count, num_rows_), key = step_ * kStepKeys;
        // Rows see keys from lo_ to hi_, which both grow from row to row.
        const bool all_seen = key > key_begin_ && key > lo_[num_rows_ - 1] && key + kStepKeys <= hi_[0];
        if (all_seen && spec_.soft_cap == 0 && pass_ != Pass::kFind)
            weigh_rows<true>(key, end);
        else
            weigh_rows<false>(key, end);
        row_ = end;
        if (end < num_rows_) return;
        row_ = 0;
        ++step_;
    }

    // Weighs rows up to `end` for the step's keys: for all keys, if none is the first that a row sees, or for those
    // that each row sees.
    template <bool kAllSeen>
    void weigh_rows(int key, int end) {
        float* scores = scores_of(step_) + row_ * kStepKeys;
        float* sums = scratch_.sums + row_ * Simd::kLanes;
        uint16_t* weights = weights_ + row_ * kRowStride + key;
        const V scale = Simd::set1(scale_);
        for (int row = row_; row < end; ++row) {
            if (!kAllSeen && spec_.soft_cap > 0) Rows::cap(spec_, 0, kStepKeys, scores);
            V first = Simd::load(scores), second = Simd::load(scores + Simd::kLanes);
            if constexpr (!kAllSeen) {
                first = seen(row, key, first);
                second = seen(row, key + Simd::kLanes, second);
                look_at(row, Simd::largest(Simd::max(first, second)));
            }
            const V shift = Simd::set1(shift_[row]);
            first = E::weights_of(Simd::fma(first, scale, shift));
            second = E::weights_of(Simd::fma(second, scale, shift));
            E::pack(weights, first, second);
            Simd::store(sums, Simd::add(Simd::add(Simd::load(sums), first), second));
            scores += kStepKeys;
            sums += Simd::kLanes;
            weights += kRowStride;
        }
    }

    // Notes the largest of a row's scores in a step.
    void look_at(int row, float largest) {
        float& known = scratch_.largest[row];
        if (pass_ != Pass::kFind) {
            if (max_[row] == kLowest) refer(row, largest);
        } else if (known != kLowest && known < largest) {
            known = largest;
        }
    }

    V seen(int row, int key, V scores) const {
        return Simd::only(scores, lo_[row] - key, hi_[row] - key, Simd::set1(kLowest));
    }

    const AttentionSpec& spec_;
    const Scratch& scratch_;
    uint16_t* weights_;
    float* max_;  // by row: the score that weights are relative to; kLowest if it saw no key
    float* sum_;
    float scale_;
    int num_rows_, key_begin_;
    Pass pass_;
    int step_, row_;  // the next ones to weigh
    int scored_end_;
    int lo_[kMaxBlockRows], hi_[kMaxBlockRows];  // the keys that a row sees
    float shift_[kMaxBlockRows];
};

}  // namespace
}  // namespace swiftkv
