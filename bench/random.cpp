#include "random.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <new>
#include <random>

#include "tessera/tessera.h"

namespace bench {
namespace {

constexpr size_t kPageBytes = 4096;

// Round to nearest, ties to even. Inputs are finite and small, so overflow and NaN need no care.
uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

uint16_t to_float16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const float magnitude = std::fabs(value);
  constexpr float kSmallestNormal = 0x1p-14f;
  if (magnitude < kSmallestNormal) {  // subnormal: steps of 2^-24
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(magnitude * 0x1p24f)));
  }
  const uint32_t rounded = (bits & 0x7FFFFFFFu) + 0xFFFu + ((bits >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

}  // namespace

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  const size_t rounded = std::max(kPageBytes, (bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
  memory_.reset(std::aligned_alloc(kPageBytes, rounded));
  if (!memory_) throw std::bad_alloc();
}

Buffer random_normal(int64_t elements, int32_t dtype, uint64_t seed) {
  Buffer buffer(static_cast<size_t>(elements) * tessera_dtype_bytes(dtype));
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  if (dtype == TESSERA_FLOAT32) {
    std::ranges::generate(buffer.as<float>(), [&] { return normal(generator); });
  } else {
    const auto round = dtype == TESSERA_BFLOAT16 ? to_bfloat16 : to_float16;
    std::ranges::generate(buffer.as<uint16_t>(), [&] { return round(normal(generator)); });
  }
  return buffer;
}

}  // namespace bench
