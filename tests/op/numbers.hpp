// The number formats of the tests' tensors: values are doubles that a format represents exactly.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::testing {

// The nearest value of `dtype` (tessera_dtype), ties to even, overflow to infinity.
double round_to(int32_t dtype, double value);

// Distance between 1 and the next value.
double epsilon(int32_t dtype);

// Writes and reads one element. `value` must be one that dtype holds.
void encode(int32_t dtype, double value, std::byte* element);
double decode(int32_t dtype, const std::byte* element);

}  // namespace tessera::testing
