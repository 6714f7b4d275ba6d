// The errors of recent forecasts of the time to the first token, so that a refusal can allow for them.
#pragma once

#include <array>
#include <cstddef>

namespace swiftkv {

// Remembers the latest forecasts, and how long each first token then took.
//
// Forecasts for similar requests have similar errors: with `hrrn`, shorter prompts that come later overtake a long one,
// but hardly ever a short one. So a request is compared with those whose prompt and forecast were about as long.
class ForecastErrors {
  public:
    // `part` of similar requests have their first token within the allowance.
    explicit ForecastErrors(double part) : part_(part) {}

    // Notes when a first token came, of a prompt with so many tokens left to compute.
    void note(double num_left, double forecast_s, double actual_s);
    // Returns the factor on the forecast within which `part` of similar requests had a token; 1 if they are few.
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
