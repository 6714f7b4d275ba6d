// The time of a step: a linear model of its work, fitted to measured steps.
#pragma once

#include <array>
#include <cstdint>

namespace swiftkv {

// The work of one step, as the sizes that its time depends on.
struct StepWork {
    double num_tokens = 0;
    double prompt_pairs = 0;    // in rows of several tokens: pairs of a computed token and a token that it attends to
    double decode_context = 0;  // in rows of one token: tokens that it attends to
    double num_rows = 0;
    double num_copies = 0;  // blocks copied to or from a lower place, or within the pool

    // Adds a row of `num_tokens` tokens after the first `begin` of its sequence. One token with guesses at the next
    // ones counts as so many rows of one token, which all sample, but keys and values are read once for all of them.
    void add_row(int begin, int num_tokens, int num_guesses = 0);
};

// How much longer steps of some number of rows take than a line through all steps says. Few rows take hardly longer
// than one, because the weights are read once for all of them; beyond some number, each row takes its time.
class RowCurve {
  public:
    RowCurve() { ratios_.fill(1); }

    // Notes that a step of `num_rows` took `ratio` times as long as the line says.
    void note(double num_rows, double ratio);
    // Returns that ratio for `num_rows`, from the latest steps with about as many rows; 1 if there were none.
    double at(double num_rows) const;

  private:
    static constexpr int kNumPoints = 21;  // two for each doubling, from 1 row to 1,024

    std::array<double, kNumPoints> weights_ = {}, sums_ = {};  // of the latest steps near each point, and their ratios
    std::array<double, kNumPoints> ratios_ = {};
};

// Predicts the time of a step as a sum of terms: one for each size of its work, and a constant. The coefficients are
// >= 0 and fit measured steps best, by least squares of relative errors. Steps with prompts and steps of decodes alone
// have the same weight, however many there are of each, and later steps have more. For a step of decodes alone, the
// latest ones with about as many rows correct the part of the sum that depends on its rows.
class StepTime {
  public:
    static constexpr int kNumTerms = 6;
    // One number per term, in the order of StepWork; the constant is last.
    using Terms = std::array<double, kNumTerms>;

    StepTime() = default;
    // Predicts by these coefficients until it has observed steps.
    explicit StepTime(const Terms& coefficients) : coefficients_(coefficients) {}

    // Returns a model that starts with coefficients fitted elsewhere and goes on from there: they count like about a
    // hundred steps of each kind, of usual sizes. Throws std::invalid_argument unless they give every step some time.
    static StepTime remembered(const Terms& coefficients);

    // Notes the measured time of a step. A time of 0 or less is ignored.
    void observe(const StepWork& work, double duration_s);
    // Whether enough steps of each kind have been measured to predict one.
    bool is_known() const;
    double predict(const StepWork& work) const;
    // Returns the number of a prompt's tokens, after its first `begin`, with which a step with `work` takes `limit_s`;
    // 0 if there is no time left.
    int longest_chunk(const StepWork& work, int begin, double limit_s) const;
    // The mean of |predicted - measured| / measured over recent steps; 0 before any step was predicted.
    double error_ratio() const { return error_ratio_; }
    // The seconds that one more row of one token takes, apart from attention.
    double row_s() const { return coefficients_[0] + coefficients_[3]; }
    const Terms& coefficients() const { return coefficients_; }
    // The coefficients that fit the last few thousand steps. They serve forecasts over minutes, whose work may differ
    // from that of the last hundred steps.
    Terms usual_coefficients() const { return is_known() ? fitted(usual_) : coefficients_; }

  private:
    // Sums over the steps of one kind, with less weight for older steps.
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
    // The sum of all terms, and that of those which depend on the number of rows.
    double line_s(const StepWork& work) const;
    double rows_s(const StepWork& work) const;
    void note_rows(const StepWork& work, double duration_s);

    Memory latest_{.retention = 0.99};  // a step counts for e^-1 after 100 others of its kind
    Memory usual_{.retention = 0.9995};
    RowCurve row_curve_ = {};
    Terms coefficients_ = {};
    double error_ratio_ = 0;
    int num_predicted_ = 0;
    int num_unfitted_ = 0;  // steps since the last fit
};

}  // namespace swiftkv
