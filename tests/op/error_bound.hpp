// The allowed error of a result against float64.
#pragma once

#include <string>
#include <vector>

#include "plain.hpp"

namespace tessera::testing {

// The largest and the RMS error against the oracle must be at most 2 x those of the plain computation; or, where that
// was exact by chance, 2 (1 + 1 / sqrt(n)) x the noise of one rounding a term, for n elements. Compares elements that
// are finite in the oracle and in `dtype`. Returns "" if the bound holds, otherwise a text to follow the tensor's name.
std::string excess_error(const std::vector<double>& value, const std::vector<double>& oracle, const PlainTensor& plain,
                         int32_t dtype);

}  // namespace tessera::testing
