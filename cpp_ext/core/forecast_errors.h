// The errors of recent forecasts of the time to the first token, so that a refusal can allow for them.
#pragma once

#include <array>
#include <cstddef>

namespace swiftkv {

// Remembers the latest forecasts and the actual time of each first token.
//
// Forecasts for similar requests have similar errors: with `hrrn`, shorter prompts that come later overtake a long one,
// but hardly ever a short one. So a request is compared with requests whose prompt and forecast were about as long.
class ForecastErrors {
  public:
    // `part`: the share of similar requests whose first token comes within the allowance.
    explicit ForecastErrors(double part) : part_(part) {}

    // Notes the actual time of the first token of a prompt that had `num_left` tokens to compute.
    void note(double num_left, double forecast_s, double actual_s);
    // Returns the allowance: the factor on the forecast within which `part` of similar requests had their first token;
    // 1 if there are few such requests.
    double allowance(double num_left, double forecast_s) const;

  private:
    struct Noted {
        double octave_left, octave_forecast;  // binary logarithms of tokens and of seconds
        double ratio;                         // actual over forecast
    };

    static constexpr size_t kRecent = 512;

    const double part_;
    std::array<Noted, kRecent> latest_{};  // a ring
    size_t num_noted_ = 0;
};

}  // namespace swiftkv
