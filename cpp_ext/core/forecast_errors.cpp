#include "forecast_errors.h"

#include <algorithm>
#include <cmath>

namespace swiftkv {

namespace {

constexpr size_t kLeastAlike = 16;  // with fewer similar requests the allowance is 1
constexpr double kAlikeOctaves = 2;

}  // namespace

void ForecastErrors::note(double num_left, double forecast_s, double actual_s) {
    latest_[num_noted_++ % kRecent] = {std::log2(num_left), std::log2(forecast_s), actual_s / forecast_s};
}

double ForecastErrors::allowance(double num_left, double forecast_s) const {
    const double octave_left = std::log2(num_left), octave_forecast = std::log2(forecast_s);
    std::array<double, kRecent> ratios;
    size_t num_alike = 0;
    for (size_t i = 0; i < std::min(num_noted_, kRecent); ++i) {
        const Noted& noted = latest_[i];
        ratios[num_alike] = noted.ratio;
        num_alike += std::abs(noted.octave_left - octave_left) + std::abs(noted.octave_forecast - octave_forecast) <
                     kAlikeOctaves;
    }
    if (num_alike < kLeastAlike) return 1;
    const auto rank = static_cast<ptrdiff_t>(std::ceil(part_ * static_cast<double>(num_alike))) - 1;
    std::nth_element(ratios.begin(), ratios.begin() + rank, ratios.begin() + static_cast<ptrdiff_t>(num_alike));
    return ratios[static_cast<size_t>(rank)];
}

}  // namespace swiftkv
