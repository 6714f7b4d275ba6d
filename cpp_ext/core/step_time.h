// How long a step takes: a linear model of its work, fitted to steps that were measured.
#pragma once

#include <array>
#include <cstdint>

namespace swiftkv {

// The work of one step, as the sizes that its time depends on.
struct StepWork {
    double num_tokens = 0;
    double prompt_pairs = 0;    // of a token that is computed and one that it looks back on, in rows of several tokens
    double decode_context = 0;  // tokens that rows of one token look back on
    double num_rows = 0;
    double num_copies = 0;  // blocks that are copied, to or from a lower place or within the pool

    // Adds a row of `num_tokens` tokens behind the first `begin` of its sequence.
    void add_row(int begin, int num_tokens);
};

// Predicts how long a step takes as a sum of terms, one for each size of its work and a constant one. The coefficients
// are those that fit measured steps best, by least squares of relative errors, and none is below 0. Steps with prompts
// and steps of decodes alone count alike, however many of each there are, and the latest ones count most.
class StepTime {
  public:
    static constexpr int kNumTerms = 6;
    // In the order of StepWork, the constant one last.
    using Terms = std::array<double, kNumTerms>;

    StepTime() = default;
    // Predicts by these coefficients until it has observed steps.
    explicit StepTime(const Terms& coefficients) : coefficients_(coefficients) {}

    // Returns what predicts as a model that was fitted elsewhere, and goes on from there: it counts like a hundred
    // steps of either kind, of usual sizes. Throws std::invalid_argument unless every step takes some time by them.
    static StepTime remembered(const Terms& coefficients);

    // Notes how long a step took. One that took no time is ignored.
    void observe(const StepWork& work, double duration_s);
    // Whether enough steps of either kind have been measured to predict one.
    bool is_known() const;
    double predict(const StepWork& work) const;
    // Returns how many tokens of a prompt, behind its first `begin`, a step with `work` can have so that it takes
    // `limit_s`: below 1 if there is no time left.
    int longest_chunk(const StepWork& work, int begin, double limit_s) const;
    // The mean of |predicted - measured| / measured, of late; 0 before any step was predicted.
    double error_ratio() const { return error_ratio_; }
    const Terms& coefficients() const { return coefficients_; }
    // The coefficients that fit the latest thousands of steps: for what lasts for minutes, and meets other work than
    // the latest hundred steps had.
    Terms usual_coefficients() const { return is_known() ? fitted(usual_) : coefficients_; }

  private:
    // Sums over the steps of one kind, in which older steps count less and less.
    struct Sums {
        std::array<Terms, kNumTerms> products = {};  // the lower half
        Terms moments = {};
        int64_t num_steps = 0;

        void add(const Terms& terms, double duration_s, double expected_s, double retention);
    };
    struct Memory {
        double retention;
        Sums prompts = {}, decodes = {};

        void add(const StepWork& work, double duration_s, double expected_s);
    };

    static Terms fitted(const Memory& memory);

    Memory latest_{.retention = 0.99};  // a step counts for e^-1 after 100 others of its kind
    Memory usual_{.retention = 0.9995};
    Terms coefficients_ = {};
    double error_ratio_ = 0;
    int num_predicted_ = 0;
    int num_unfitted_ = 0;  // steps since the last fit
};

}  // namespace swiftkv
