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
constexpr double kCurveRetention = 1 - 1.0 / 128;
constexpr double kNeighbour = 1.0 / 32;  // the weight of a step half a doubling of rows away

using Terms = StepTime::Terms;
constexpr int kNumTerms = StepTime::kNumTerms;

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

// The place of a number of rows between the points of a curve.
struct Place {
    int point;    // the one before it
    double part;  // of the way to the next one
};

Place place_of(double num_rows, int num_points) {
    const double at = std::clamp(2 * std::log2(num_rows), 0.0, num_points - 1.0);
    const int point = std::min(static_cast<int>(at), num_points - 2);
    return {point, at - point};
}

// Returns the values with those of other points added, each times kNeighbour for every point in between.
template <size_t n>
std::array<double, n> spread(const std::array<double, n>& values) {
    std::array<double, n> all = values;
    for (size_t i = 1; i < n; ++i) all[i] += kNeighbour * all[i - 1];
    double above = 0;
    for (size_t i = n; i-- > 0;) {
        all[i] += kNeighbour * above;
        above = values[i] + kNeighbour * above;
    }
    return all;
}

}  // namespace

void RowCurve::note(double num_rows, double ratio) {
    const auto [point, part] = place_of(num_rows, kNumPoints);
    for (int i = 0; i < kNumPoints; ++i) {
        const double weight = i == point ? 1 - part : i == point + 1 ? part : 0;
        weights_[i] = kCurveRetention * weights_[i] + weight;
        sums_[i] = kCurveRetention * sums_[i] + weight * ratio;
    }
    const std::array<double, kNumPoints> weights = spread(weights_), sums = spread(sums_);
    for (int i = 0; i < kNumPoints; ++i) ratios_[i] = sums[i] / weights[i];
}

double RowCurve::at(double num_rows) const {
    const auto [point, part] = place_of(num_rows, kNumPoints);
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
void StepTime::Sums::add(const Terms& terms, double duration_s, double expected_s, double retention) {
    ++num_steps;
    const double unit_s = std::clamp(expected_s, duration_s / kInterrupted, duration_s * kInterrupted);
    Terms scaled;
    for (int i = 0; i < kNumTerms; ++i) scaled[i] = terms[i] / unit_s;
    for (int i = 0; i < kNumTerms; ++i) {
        for (int j = 0; j <= i; ++j) products[i][j] = retention * products[i][j] + scaled[i] * scaled[j];
        moments[i] = retention * moments[i] + scaled[i] * (duration_s / unit_s);
    }
}

void StepTime::Memory::add(const StepWork& work, double duration_s, double expected_s) {
    (work.prompt_pairs > 0 ? prompts : decodes).add(terms_of(work), duration_s, expected_s, retention);
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
        for (Memory* memory : {&step_time.latest_, &step_time.usual_}) memory->add(work, duration_s, duration_s);
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
    if (duration_s <= 0) return;
    double expected_s = duration_s;
    if (is_known()) {
        expected_s = predict(work);
        const double error = std::abs(expected_s - duration_s) / duration_s;
        num_predicted_ = std::min(num_predicted_ + 1, kErrorWindow);
        error_ratio_ += (error - error_ratio_) / num_predicted_;
    }
    if (is_known() && is_of_decodes(work)) note_rows(work, duration_s);
    for (Memory* memory : {&latest_, &usual_}) memory->add(work, duration_s, expected_s);
    const bool is_early = latest_.prompts.num_steps + latest_.decodes.num_steps < kFirstSteps;
    if (++num_unfitted_ < (is_early ? 1 : kStepsPerFit)) return;
    num_unfitted_ = 0;
    coefficients_ = fitted(latest_);
}

bool StepTime::is_known() const {
    return latest_.prompts.num_steps >= kMinPromptSteps && latest_.decodes.num_steps > 0;
}

double StepTime::predict(const StepWork& work) const {
    const double excess = is_of_decodes(work) ? row_curve_.at(work.num_rows) - 1 : 0;
    return line_s(work) + excess * rows_s(work);
}

double StepTime::line_s(const StepWork& work) const {
    const Terms terms = terms_of(work);
    double sum_s = 0;
    for (int i = 0; i < kNumTerms; ++i) sum_s += coefficients_[i] * terms[i];
    return sum_s;
}

double StepTime::rows_s(const StepWork& work) const {
    return coefficients_[0] * work.num_tokens + coefficients_[3] * work.num_rows + coefficients_[5];
}

void StepTime::note_rows(const StepWork& work, double duration_s) {
    const double of_rows_s = rows_s(work);
    if (of_rows_s <= 0) return;
    const double of_others_s = line_s(work) - of_rows_s;
    const double expected = row_curve_.at(work.num_rows);
    const double ratio = (duration_s - of_others_s) / of_rows_s;
    row_curve_.note(work.num_rows, std::clamp(ratio, expected / kInterrupted, expected * kInterrupted));
}

// The time of a chunk of n tokens is a n^2 + b n plus the time of its row.
int StepTime::longest_chunk(const StepWork& work, int begin, double limit_s) const {
    const auto [per_token, per_pair, per_context, per_row, per_copy, constant] = coefficients_;
    const double left_s = limit_s - line_s(work) - per_row;
    if (left_s <= 0) return 0;
    const double b = per_token + per_pair * begin;
    const double longest = 2 * left_s / (b + std::sqrt(b * b + 2 * per_pair * left_s));
    return static_cast<int>(std::min<double>(longest, std::numeric_limits<int>::max()));
}

// Fits the coefficients. Leaves out the term with the lowest one until none is below 0.
Terms StepTime::fitted(const Memory& memory) {
    const Sums &prompts = memory.prompts, &decodes = memory.decodes;
    std::array<Terms, kNumTerms> products;
    Terms moments, scale;  // terms are scaled to one size, because they differ by many orders of magnitude
    for (int i = 0; i < kNumTerms; ++i) {
        const double square = prompts.products[i][i] + decodes.products[i][i];
        scale[i] = square > 0 ? 1 / std::sqrt(square) : 0;
        moments[i] = scale[i] * (prompts.moments[i] + decodes.moments[i]);
        for (int j = 0; j < i; ++j)
            products[i][j] = scale[i] * scale[j] * (prompts.products[i][j] + decodes.products[i][j]);
        products[i][i] = 1 + kRidge;
    }
    while (true) {
        Terms found = solve(products, moments);
        const int lowest = static_cast<int>(std::min_element(found.begin(), found.end()) - found.begin());
        if (found[lowest] >= 0) {
            for (int i = 0; i < kNumTerms; ++i) found[i] *= scale[i];
            return found;
        }
        moments[lowest] = 0;
        for (int k = 0; k < kNumTerms; ++k)
            if (k != lowest) products[std::max(k, lowest)][std::min(k, lowest)] = 0;
    }
}

}  // namespace swiftkv
