#include "step_time.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace swiftkv {

namespace {

constexpr double kRidge = 1e-6;     // divides the time between terms that rise and fall together
constexpr int kMinPromptSteps = 4;  // and one step of decodes alone
constexpr int kStepsPerFit = 16;    // except for the first kFirstSteps, each of which is fitted
constexpr int kFirstSteps = 64;
constexpr int kErrorWindow = 200;   // predictions
constexpr double kInterrupted = 2;  // a step that took more times as long as expected was held up by something else
constexpr double kShortestStepS = 1e-9;  // one that seems shorter was not measured
constexpr double kPaceStep = 0.25;       // the weight of the latest step in the pace
constexpr double kNeighbour = 1.0 / 32;  // the weight of a step half a doubling of tokens away

using Terms = StepTerms;
constexpr int kNumTerms = kNumStepTerms;

Terms terms_of(const StepWork& work) {
    return {work.num_tokens, work.prompt_pairs, work.decode_context, work.num_rows, work.num_copies, 1.0};
}

// Whether a step computes decodes, guesses included, and no prompts.
bool is_of_decodes(const StepWork& work) {
    return work.prompt_pairs == 0 && work.num_rows > 0;
}

// Solves a x = b for a positive definite `a` with its lower half given, by Cholesky's method in place.
Terms solve(std::array<Terms, kNumTerms> a, Terms x) {
    for (int i = 0; i < kNumTerms; ++i) {
        for (int j = 0; j <= i; ++j) {
            double sum = a[i][j];
            for (int k = 0; k < j; ++k) sum -= a[i][k] * a[j][k];
            a[i][j] = i == j ? std::sqrt(std::max(sum, std::numeric_limits<double>::min())) : sum / a[j][j];
        }
        for (int k = 0; k < i; ++k) x[i] -= a[i][k] * x[k];
        x[i] /= a[i][i];
    }
    for (int i = kNumTerms - 1; i >= 0; --i) {
        for (int k = i + 1; k < kNumTerms; ++k) x[i] -= a[k][i] * x[k];
        x[i] /= a[i][i];
    }
    return x;
}

// The position of a number of tokens between the points of a curve.
struct Position {
    int point;    // the one before it
    double part;  // of the way to the next one
};

Position position_of(double num_tokens) {
    constexpr int last = TokenCurve::kNumPoints - 1;
    const double at = std::clamp(2 * std::log2(num_tokens), 0.0, static_cast<double>(last));
    const int point = std::min(static_cast<int>(at), last - 1);
    return {point, at - point};
}

// The parts of a step's time: what depends on the number of tokens, and the rest.
struct Parts {
    double of_tokens;
    double of_others;
};

Parts parts_of(const Terms& terms, const Terms& coefficients) {
    const auto part = [&](int i) { return coefficients[i] * terms[i]; };
    return {part(0) + part(3) + part(5), part(1) + part(2) + part(4)};
}

// Adds to each value those of other points, each times kNeighbour for every point in between.
TokenCurve::Ratios spread(const TokenCurve::Ratios& values) {
    TokenCurve::Ratios all = values;
    for (size_t i = 1; i < all.size(); ++i) all[i] += kNeighbour * all[i - 1];
    double above = 0;
    for (size_t i = all.size(); i-- > 0;) {
        all[i] += kNeighbour * above;
        above = values[i] + kNeighbour * above;
    }
    return all;
}

// Returns `value`, but at most kInterrupted times as much or as little as was expected.
double limited(double value, double expected) {
    return std::clamp(value, expected / kInterrupted, expected * kInterrupted);
}

}  // namespace

TokenCurve::Ratios TokenCurve::straight() {
    Ratios ratios;
    ratios.fill(1);
    return ratios;
}

void TokenCurve::add(double num_tokens, const Terms& terms, double duration) {
    const auto [point, part] = position_of(num_tokens);
    for (int i = 0; i < kNumPoints; ++i) {
        const double weight = i == point ? 1 - part : i == point + 1 ? part : 0;
        for (int k = 0; k < kNumTerms; ++k) sums_[i].terms[k] = retention_ * sums_[i].terms[k] + weight * terms[k];
        sums_[i].duration = retention_ * sums_[i].duration + weight * duration;
    }
}

void TokenCurve::fit(const Terms& coefficients) {
    Ratios expected, taken;
    for (int i = 0; i < kNumPoints; ++i) {
        const auto [of_tokens, of_others] = parts_of(sums_[i].terms, coefficients);
        expected[i] = of_tokens;
        taken[i] = sums_[i].duration - of_others;
    }
    expected = spread(expected), taken = spread(taken);
    for (int i = 0; i < kNumPoints; ++i)
        ratios_[i] = expected[i] > 0 ? std::clamp(taken[i] / expected[i], 1 / kInterrupted, kInterrupted) : 1;
}

double TokenCurve::at(double num_tokens) const {
    const auto [point, part] = position_of(num_tokens);
    return (1 - part) * ratios_[point] + part * ratios_[point + 1];
}

void StepWork::add_row(int begin, int count, int num_guesses) {
    num_tokens += count;
    num_rows += 1 + num_guesses;
    if (count - num_guesses == 1) {
        decode_context += begin + count;
    } else {
        prompt_pairs += count * (begin + 0.5 * count);
    }
}

// Adds a step with weight 1 / (its expected time)^2, so that relative errors count. With the measured time instead,
// steps that took long by chance would count less, and predictions would be too low. For a step that was held up that
// is right, so its weight falls with the measured time.
void StepFit::Sums::add(const Terms& terms, double duration_s, double expected_s, double retention) {
    ++num_steps;
    const double unit_s = limited(expected_s, duration_s);
    Terms scaled;
    for (int i = 0; i < kNumTerms; ++i) scaled[i] = terms[i] / unit_s;
    for (int i = 0; i < kNumTerms; ++i) {
        for (int j = 0; j <= i; ++j) products[i][j] = retention * products[i][j] + scaled[i] * scaled[j];
        moments[i] = retention * moments[i] + scaled[i] * (duration_s / unit_s);
    }
}

void StepFit::add(const StepWork& work, double duration_s, double expected_s) {
    const Terms terms = terms_of(work);
    (work.prompt_pairs > 0 ? prompts_ : decodes_).add(terms, duration_s, expected_s, retention_);
    if (work.num_tokens == 0) return;  // of copies alone
    Terms scaled;
    for (int i = 0; i < kNumTerms; ++i) scaled[i] = terms[i] / expected_s;
    curve_.add(work.num_tokens, scaled, limited(duration_s / expected_s, 1));
}

void StepFit::fit() {
    fit_line();
    curve_.fit(coefficients_);
}

void StepFit::set(const Terms& coefficients, const TokenCurve::Ratios& ratios) {
    coefficients_ = coefficients;
    curve_.set_ratios(ratios);
}

double StepFit::predict(const StepWork& work) const {
    const auto [of_tokens_s, of_others_s] = parts_of(terms_of(work), coefficients_);
    return of_others_s + of_tokens_s * (work.num_tokens > 0 ? curve_.at(work.num_tokens) : 1);
}

// Leaves out the term with the lowest coefficient until none is below 0.
void StepFit::fit_line() {
    std::array<Terms, kNumTerms> products;
    Terms moments, scale;  // terms are scaled to one size, because they differ by many orders of magnitude
    for (int i = 0; i < kNumTerms; ++i) {
        const double square = prompts_.products[i][i] + decodes_.products[i][i];
        scale[i] = square > 0 ? 1 / std::sqrt(square) : 0;
        moments[i] = scale[i] * (prompts_.moments[i] + decodes_.moments[i]);
        for (int j = 0; j < i; ++j)
            products[i][j] = scale[i] * scale[j] * (prompts_.products[i][j] + decodes_.products[i][j]);
        products[i][i] = 1 + kRidge;
    }
    while (true) {
        const Terms found = solve(products, moments);
        const int lowest = static_cast<int>(std::min_element(found.begin(), found.end()) - found.begin());
        if (found[lowest] >= 0) {
            for (int i = 0; i < kNumTerms; ++i) coefficients_[i] = scale[i] * found[i];
            return;
        }
        moments[lowest] = 0;
        for (int k = 0; k < kNumTerms; ++k)
            if (k != lowest) products[std::max(k, lowest)][std::min(k, lowest)] = 0;
    }
}

StepTime::StepTime(const Terms& coefficients, const TokenCurve::Ratios& ratios) {
    latest_.set(coefficients, ratios);
    usual_.set(coefficients, ratios);
}

StepTime StepTime::remembered(const Terms& coefficients) {
    const auto is_sound = [](double c) { return c >= 0 && std::isfinite(c); };
    if (!std::all_of(coefficients.begin(), coefficients.end(), is_sound) || coefficients[0] + coefficients[5] <= 0)
        throw std::invalid_argument("a step takes some time, and no term of it is negative");
    StepTime step_time(coefficients);
    const auto remember = [&](int num_answers, int context, int begin, int chunk, int num_copies) {
        StepWork work;
        for (int i = 0; i < num_answers; ++i) work.add_row(context, 1);
        if (chunk > 0) work.add_row(begin, chunk);
        work.num_copies = num_copies;
        const double duration_s = step_time.predict(work);
        for (StepFit* fit : {&step_time.latest_, &step_time.usual_}) fit->add(work, duration_s, duration_s);
    };
    for (const int num_answers : {1, 2, 4, 8, 16, 64}) {
        for (const int context : {50, 500, 5000}) {
            for (const int num_copies : {0, 0, 0, 0, 8}) remember(num_answers, context, 0, 0, num_copies);
            for (const int chunk : {32, 128, 512, 2048}) remember(num_answers - 1, context, context, chunk, 0);
        }
    }
    return step_time;
}

void StepTime::observe(const StepWork& work, double duration_s) {
    if (!(duration_s >= kShortestStepS && std::isfinite(duration_s))) return;
    double expected_s = duration_s;
    if (is_known()) {
        note_error(predict(work), duration_s);
        if (const double steady_s = latest_.predict(work); steady_s > 0) expected_s = steady_s;
        if (is_of_decodes(work)) pace_ += kPaceStep * (limited(duration_s / expected_s, 1) - pace_);
    }
    for (StepFit* fit : {&latest_, &usual_}) fit->add(work, duration_s, expected_s);
    const bool is_early = latest_.num_prompt_steps() + latest_.num_decode_steps() < kFirstSteps;
    if (++num_unfitted_ < (is_early ? 1 : kStepsPerFit)) return;
    num_unfitted_ = 0;
    for (StepFit* fit : {&latest_, &usual_}) fit->fit();
}

void StepTime::note_error(double predicted_s, double duration_s) {
    const double error = std::abs(predicted_s - duration_s) / duration_s;
    num_predicted_ = std::min(num_predicted_ + 1, kErrorWindow);
    error_ratio_ += (error - error_ratio_) / num_predicted_;
}

bool StepTime::is_known() const {
    return latest_.num_prompt_steps() >= kMinPromptSteps && latest_.num_decode_steps() > 0;
}

double StepTime::predict(const StepWork& work) const {
    return latest_.predict(work) * (is_of_decodes(work) ? pace_ : 1);
}

int StepTime::longest_chunk(const StepWork& work, int begin, double limit_s) const {
    const auto fits = [&](int64_t num_tokens) {
        StepWork more = work;
        more.num_tokens += static_cast<double>(num_tokens);
        more.num_rows += 1;
        more.prompt_pairs += static_cast<double>(num_tokens) * (begin + 0.5 * static_cast<double>(num_tokens));
        return latest_.predict(more) <= limit_s;
    };
    int64_t longest = 0, too_long = 1;
    for (; fits(too_long); too_long *= 2) {
        if (too_long > std::numeric_limits<int>::max()) return std::numeric_limits<int>::max();
        longest = too_long;
    }
    while (too_long - longest > 1) {
        const int64_t middle = (longest + too_long) / 2;
        (fits(middle) ? longest : too_long) = middle;
    }
    return static_cast<int>(longest);
}

}  // namespace swiftkv
