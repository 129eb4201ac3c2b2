// What host and device both name: element types, and how a tensor is described.
#pragma once

#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

// A kernel's config and its fields, side by side: on the host visit_fields calls visit("a, b", config.a, config.b), by
// which a config is written as the source's template argument and looked up. A field that only one of the two has does
// not compile. An enum among the fields is written by its name. Fields may come from macros.
#if defined(__CUDACC__)
#define TESSERA_CONFIG_FIELDS(Config, ...)
#define TESSERA_ENUM_NAME(Enum)
#else
#define TESSERA_CONFIG_FIELDS(Config, ...) TESSERA_EXPANDED_FIELDS(Config, __VA_ARGS__)
#define TESSERA_EXPANDED_FIELDS(Config, ...)               \
  template <class Visit>                                   \
  void visit_fields(const Config& config, Visit&& visit) { \
    const auto& [__VA_ARGS__] = config;                    \
    visit(#__VA_ARGS__, __VA_ARGS__);                      \
  }                                                        \
  constexpr const char* type_name(const Config&) { return #Config; }
#define TESSERA_ENUM_NAME(Enum) \
  constexpr const char* enum_name(Enum) { return #Enum; }
#endif

namespace tessera {

// tessera_dtype's numbers
enum class Dtype : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat8E4M3 = 10, kFloat8E5M2 = 11 };

TESSERA_ENUM_NAME(Dtype)

TESSERA_HOST_DEVICE constexpr int dtype_bytes(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 4 : dtype == Dtype::kFloat8E4M3 || dtype == Dtype::kFloat8E5M2 ? 1 : 2;
}

using int64 = long long;
using uint32 = unsigned;
static_assert(sizeof(int64) == 8 && sizeof(uint32) == 4);

// A [batch, row, head, column] tensor whose columns are contiguous; strides in elements. Packed: batch = 0.
// Paged: `batch` is the stride of a page and `row` that of a row within it.
struct RowTensor {
  void* data;
  int64 batch, row, head;
};

// [batch, head, row], float32, strides in elements. NULL: absent.
struct StatTensor {
  float* data;
  int64 batch, head, row;

  TESSERA_HOST_DEVICE constexpr float* at(int of_batch, int of_head, int64 of_row) const {
    return data + batch * of_batch + head * of_head + row * of_row;
  }
};

// A tensor over scores, [batch, head, query, key]; what is broadcast has stride 0; strides in elements. NULL: absent.
struct ScoreTensor {
  void* data;
  int64 batch, head, row, col;
};

// CUtensorMap: how a bulk copy finds a tensor. Made by the driver.
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

// ---- divisors -------------------------------------------------------------------------------------------------------
//
// A divisor that is known before the kernel runs: quotients need a multiplication and a shift, where a division is a
// chain of some twenty dependent instructions (Granlund and Montgomery, "Division by invariant integers using
// multiplication", 1994). Gives n / d and n % d for 0 <= n < 2^31 and d >= 1. A divisor of 0, for what a tensor lacks,
// is allowed: its quotients are 0.

struct Divisor {
  int value;
  unsigned multiplier;  // ceil(2^shift / value), or 0
  int shift;            // 31 + ceil(log2(value))

  Divisor() = default;
  TESSERA_HOST_DEVICE constexpr explicit Divisor(int divisor) : value(divisor), multiplier(0), shift(31) {
    while ((1u << (shift - 31)) < static_cast<unsigned>(value)) ++shift;
    const unsigned d = static_cast<unsigned>(value);
    if (d > 0) multiplier = static_cast<unsigned>(((1ull << shift) + d - 1) / d);
  }
  TESSERA_HOST_DEVICE constexpr operator int() const { return value; }
};

TESSERA_HOST_DEVICE constexpr int operator/(int n, const Divisor& d) {
  return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(n)) * d.multiplier >> d.shift);
}
TESSERA_HOST_DEVICE constexpr int operator%(int n, const Divisor& d) { return n - n / d * d.value; }

}  // namespace tessera
