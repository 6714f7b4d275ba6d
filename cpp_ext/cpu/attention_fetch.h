#pragma once

// Fetches keys and values before they are multiplied. Include after a simd_*.h; all of it has internal linkage.
#include "attention_keys.h"

namespace swiftkv {
namespace {

// Fetches the data that a thread reads next into the first- or second-level cache (kCacheLevel), a few lines at a time,
// because many at once would hold up the thread's own loads. Processors look ahead only within a page, and a group
// often has a page of its own. So lines are fetched from four groups in rotation: the processor then looks ahead in all
// four.
template <typename E, int kCacheLevel>
class Fetcher {
  public:
    using Elem = typename E::Elem;
    static constexpr int kGroupsInTurn = 4;

    // Begins to fetch what is read after the partition's first groups, which were fetched earlier: the rest of its
    // keys, its values, and the first of the keys that follow.
    template <typename Keys>
    void begin_within(const AttentionSpec& spec, const Keys& keys) {
        const int first = keys.first_group(), end = keys.end_group();
        begin(spec);
        add(true, keys.k, smaller(first + kGroupsInTurn, end), end);
        add(false, keys.v, first, end);
        add(true, keys.k, end, end + smaller(kGroupsInTurn, keys.num_ahead));
    }

    // Begins to fetch what follows the partition, whose own lines are read again and again.
    template <typename Keys>
    void begin_behind(const AttentionSpec& spec, const Keys& keys) {
        const int end = keys.end_group();
        begin(spec);
        add(true, keys.k, end, end + keys.num_ahead);
        add(false, keys.v, end, end + keys.num_ahead);
    }

    // The number of lines in all runs.
    int num_lines() const {
        int lines = 0;
        for (int i = 0; i < num_runs_; ++i) lines += (runs_[i].end - runs_[i].begin) * lines_of(runs_[i]);
        return lines;
    }

    void operator()(int num_lines) {
        // Keeps gcc 12 from making two loops, one of which fetches nothing: the sums of AVX2 would leave the registers.
        if constexpr (Simd::kLanes == 8) asm volatile("" ::: "memory");
        if (is_done_) return;  // one branch per step of a product; looking for lines took 4 % of a prompt's time
        for (; num_lines > 0; --num_lines) {
            if (turn_ == num_turns_ && !next_line()) return;
            __builtin_prefetch(groups_[turn_++] + offset_, 0, 4 - kCacheLevel);
        }
    }

  private:
    static constexpr int kLineElements = 64 / sizeof(Elem);

    struct Run {
        bool is_keys;
        const Elem* const* groups;
        int begin, end;
    };

    void begin(const AttentionSpec& spec) {
        k_stride_ = spec.block_size * E::kPack;
        k_lines_ = spec.head_dim / E::kPack;
        v_lines_ = kGroupTokens * spec.v_head_dim / kLineElements;
        num_runs_ = run_ = 0;
        num_turns_ = turn_ = 0;
        lines_left_ = 0;
        is_done_ = false;
    }
    void add(bool is_keys, const Elem* const* groups, int begin, int end) {
        runs_[num_runs_++] = {is_keys, groups, begin, end};
    }
    int lines_of(const Run& run) const { return run.is_keys ? k_lines_ : v_lines_; }

    // Goes to the next line of the current groups, or to the next groups; returns whether there are any.
    bool next_line() {
        if (lines_left_ <= 1) return next_groups();
        --lines_left_;
        offset_ += stride_;
        turn_ = 0;
        return true;
    }
    bool next_groups() {
        while (run_ < num_runs_ && runs_[run_].begin == runs_[run_].end) ++run_;
        is_done_ = run_ == num_runs_;
        if (is_done_) return false;
        Run& run = runs_[run_];
        groups_ = run.groups + run.begin;
        num_turns_ = smaller(kGroupsInTurn, run.end - run.begin);
        run.begin += num_turns_;
        stride_ = run.is_keys ? k_stride_ : kLineElements;
        lines_left_ = lines_of(run);
        offset_ = turn_ = 0;
        return true;
    }

    int k_stride_, k_lines_, v_lines_;
    Run runs_[3];
    int num_runs_, run_;
    const Elem* const* groups_;  // the groups that are fetched in rotation
    int num_turns_, turn_;
    int64_t offset_, stride_;  // of their current line
    int lines_left_;           // of each group, with the current one
    bool is_done_;             // all lines of all runs are fetched
};

}  // namespace
}  // namespace swiftkv
