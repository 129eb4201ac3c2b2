#include "error_bound.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "numbers.hpp"

namespace tessera::testing {
namespace {

constexpr double kTimesPlain = 2;
constexpr double kDenormal = std::numeric_limits<float>::min();  // kernels may flush smaller numbers to 0

struct Errors {
  double largest = 0, rms = 0;
  size_t where = 0;
};

// Over the elements that are finite in the oracle and in `dtype`.
Errors errors(const std::vector<double>& value, const std::vector<double>& oracle, int32_t dtype) {
  Errors result;
  double squares = 0;
  size_t count = 0;
  for (size_t n = 0; n < value.size(); ++n) {
    if (!std::isfinite(round_to(dtype, oracle[n]))) continue;
    const double error = std::fabs(value[n] - oracle[n]);
    if (!(error <= result.largest)) {
      result.largest = error;
      result.where = n;
    }
    squares += error * error;
    ++count;
  }
  result.rms = count ? std::sqrt(squares / static_cast<double>(count)) : 0;
  return result;
}

Errors noise_of(const PlainTensor& plain, const std::vector<double>& oracle, int32_t dtype) {
  Errors result;
  double squares = 0;
  size_t count = 0;
  for (size_t n = 0; n < oracle.size(); ++n) {
    if (!std::isfinite(round_to(dtype, oracle[n])) || !std::isfinite(plain.noise[n])) continue;
    result.largest = std::max(result.largest, plain.noise[n]);
    squares += plain.noise[n] * plain.noise[n];
    ++count;
  }
  result.rms = count ? std::sqrt(squares / static_cast<double>(count)) : 0;
  return result;
}

}  // namespace

std::string excess_error(const std::vector<double>& value, const std::vector<double>& oracle, const PlainTensor& plain,
                         int32_t dtype) {
  const Errors error = errors(value, oracle, dtype);
  const Errors plain_error = errors(plain.value, oracle, dtype);
  const Errors noise = noise_of(plain, oracle, dtype);
  // One element can be far off where thousands hardly are: noise is a standard deviation.
  const double times_noise = kTimesPlain * (1 + 1 / std::sqrt(std::max<double>(1, static_cast<double>(value.size()))));
  const double largest = std::max({kTimesPlain * plain_error.largest, times_noise * noise.largest, kDenormal});
  const double rms = std::max({kTimesPlain * plain_error.rms, times_noise * noise.rms, kDenormal});
  char line[256] = "";
  if (std::isfinite(plain_error.largest) && !(error.largest <= largest)) {
    std::snprintf(line, sizeof line,
                  "[%zu] is %.9g, the oracle has %.9g: largest error %.3g, accepted %.3g (plain's is %.3g, noise %.3g)",
                  error.where, value[error.where], oracle[error.where], error.largest, largest, plain_error.largest,
                  noise.largest);
  } else if (std::isfinite(plain_error.rms) && !(error.rms <= rms)) {
    std::snprintf(line, sizeof line, ": RMS error %.3g, accepted %.3g (plain's is %.3g, noise %.3g)", error.rms, rms,
                  plain_error.rms, noise.rms);
  }
  return line;
}

}  // namespace tessera::testing
