// What host and device both name: element types, and how a tensor is described.
#pragma once

#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

// A kernel's config and its fields, side by side: on the host visit_fields calls visit("a, b", config.a, config.b), by
// which a config is written as the source's template argument and looked up. A field that only one of the two has does
// not compile. An enum among the fields is written by its name.
#if defined(__CUDACC__)
#define TESSERA_CONFIG_FIELDS(Config, ...)
#define TESSERA_ENUM_NAME(Enum)
#else
#define TESSERA_CONFIG_FIELDS(Config, ...)                 \
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

enum class Dtype : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat8E4M3 = 10 };  // tessera_dtype's numbers

TESSERA_ENUM_NAME(Dtype)

TESSERA_HOST_DEVICE constexpr int dtype_bytes(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 4 : dtype == Dtype::kFloat8E4M3 ? 1 : 2;
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

}  // namespace tessera
