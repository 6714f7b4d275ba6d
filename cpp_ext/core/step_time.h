// The time of a step: a model of its work, fitted to measured steps.
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

    // Adds a row of `num_tokens` tokens after the first `begin` of its sequence. A token with guesses at the next ones
    // counts as that many rows of one token. All of them sample, but keys and values are read once for all of them.
    void add_row(int begin, int num_tokens, int num_guesses = 0);
};

// One number for each size of a step's work, in the order of StepWork, and a constant, which is last.
inline constexpr int kNumStepTerms = 6;
using StepTerms = std::array<double, kNumStepTerms>;

// The time of a step, divided by the time that a line through all steps predicts, as a function of its number of
// tokens. A few tokens take hardly longer than one, because the weights are read once for all of them. Beyond some
// number, every token adds time.
class TokenCurve {
  public:
    static constexpr int kNumPoints = 27;  // two for each doubling, from 1 token to 8,192
    using Ratios = std::array<double, kNumPoints>;

    // The weight of a step falls to 1 / e after 1 / (1 - retention) later ones.
    explicit TokenCurve(double retention) : retention_(retention) {}

    // The ratios of a curve that is the line itself.
    static Ratios straight();

    // Adds a step of `num_tokens`, with the sizes of its work and its time divided by its expected time.
    void add(double num_tokens, const StepTerms& terms, double duration);
    // Computes the ratio at each point for this line, from the latest steps with about as many tokens; 1 without any.
    void fit(const StepTerms& coefficients);
    double at(double num_tokens) const;
    // The ratio at each point.
    const Ratios& ratios() const { return ratios_; }
    void set_ratios(const Ratios& ratios) { ratios_ = ratios; }

  private:
    // Sums over the latest steps near a point. The line may change afterwards, so they do not depend on it.
    struct Sums {
        StepTerms terms = {};
        double duration = 0;
    };

    double retention_;
    std::array<Sums, kNumPoints> sums_ = {};
    Ratios ratios_ = straight();
};

// A line fitted to measured steps by least squares of relative errors, and the curve of its errors. Steps with prompts
// and steps of decodes alone have the same weight in sum, however many there are of each. Later steps weigh more.
class StepFit {
  public:
    // The weight of a step falls to 1 / e after 1 / (1 - retention) later ones of its kind.
    StepFit(double retention, double curve_retention) : retention_(retention), curve_(curve_retention) {}

    // Adds a step that was expected to take `expected_s`.
    void add(const StepWork& work, double duration_s, double expected_s);
    // Fits the line, and then the curve, to the steps that were added.
    void fit();
    // Begins with a line and a curve that were found elsewhere.
    void set(const StepTerms& coefficients, const TokenCurve::Ratios& ratios);

    double predict(const StepWork& work) const;
    int64_t num_prompt_steps() const { return prompts_.num_steps; }
    int64_t num_decode_steps() const { return decodes_.num_steps; }
    const StepTerms& coefficients() const { return coefficients_; }
    const TokenCurve::Ratios& ratios() const { return curve_.ratios(); }

  private:
    // Sums over the steps of one kind, with less weight for older steps.
    struct Sums {
        std::array<StepTerms, kNumStepTerms> products = {};  // the lower half
        StepTerms moments = {};
        int64_t num_steps = 0;

        void add(const StepTerms& terms, double duration_s, double expected_s, double retention);
    };

    void fit_line();

    double retention_;
    Sums prompts_ = {}, decodes_ = {};
    StepTerms coefficients_ = {};  // >= 0
    TokenCurve curve_;
};

// Predicts the time of a step as a sum of terms: one for each size of its work, and a constant. The part that depends
// on the number of tokens is corrected by the latest steps with about as many. The prediction for a step of decodes
// alone is also scaled by the pace of the latest such steps, because whatever slows a machine down lasts for some
// steps.
class StepTime {
  public:
    using Terms = StepTerms;

    StepTime() = default;
    // Predicts by these coefficients and ratios until it has observed steps.
    explicit StepTime(const Terms& coefficients, const TokenCurve::Ratios& ratios = TokenCurve::straight());

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
    double row_s() const { return latest_.coefficients()[0] + latest_.coefficients()[3]; }
    // The fit to about a hundred of the latest steps of each kind.
    const StepFit& latest() const { return latest_; }
    // The fit to the latest few thousand steps. It serves forecasts over minutes, whose work may differ from that of
    // the last hundred steps.
    const StepFit& usual() const { return usual_; }

  private:
    void note_error(double predicted_s, double duration_s);

    StepFit latest_{0.99, 1 - 1.0 / 256};
    StepFit usual_{0.9995, 1 - 1.0 / 2048};
    double pace_ = 1;  // of steps of decodes: their time divided by what the latest fit says
    double error_ratio_ = 0;
    int num_predicted_ = 0;
    int num_unfitted_ = 0;  // steps since the last fit
};

}  // namespace swiftkv
