// The names of the C interface's enumerators, and its version.
#include "core/names.hpp"

#include <cstdio>

namespace {

struct Dtype {
  const char* name;
  size_t bytes;
};

constexpr Dtype kDtypes[] = {
    {"float32", 4}, {"float16", 2}, {"bfloat16", 2}, {"float64", 8}, {"int32", 4},       {"bool", 1},
    {"int64", 8},   {"int8", 1},    {"int16", 2},    {"uint8", 1},   {"float8_e4m3", 1}, {"float8_e5m2", 1},
};
static_assert(std::size(kDtypes) == TESSERA_FLOAT8_E5M2 + 1, "one row for each tessera_dtype");

constexpr const char* kIsaNames[] = {"baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16", "neon", "neon_bf16"};
static_assert(std::size(kIsaNames) == TESSERA_ISA_NEON_BF16 + 1, "one name for each tessera_isa");

template <typename Row, size_t kRows>
const Row* row(const Row (&table)[kRows], int32_t index) {
  return index >= 0 && static_cast<size_t>(index) < kRows ? &table[index] : nullptr;
}

tessera::core::NameText text_of(const char* name, bool known, int32_t number) {
  tessera::core::NameText result{};
  std::snprintf(result.text, sizeof result.text, known ? "%s" : "%s (%d)", name, number);
  return result;
}

}  // namespace

namespace tessera::core {

NameText dtype_text(int32_t dtype) { return text_of(tessera_dtype_name(dtype), row(kDtypes, dtype) != nullptr, dtype); }

NameText isa_text(int32_t isa) { return text_of(tessera_isa_name(isa), row(kIsaNames, isa) != nullptr, isa); }

}  // namespace tessera::core

extern "C" {

const char* tessera_dtype_name(int32_t dtype) {
  const Dtype* found = row(kDtypes, dtype);
  return found ? found->name : "unknown";
}

size_t tessera_dtype_bytes(int32_t dtype) {
  const Dtype* found = row(kDtypes, dtype);
  return found ? found->bytes : 0;
}

const char* tessera_isa_name(int32_t isa) {
  const char* const* found = row(kIsaNames, isa);
  return found ? *found : "unknown";
}

const char* tessera_kernel_name(int32_t kernel) {
  const tessera::core::KernelName* found = row(tessera::core::kKernelNames, kernel);
  return found ? found->name : "unknown";
}

#define TESSERA_STRING_(x) #x
#define TESSERA_STRING(x) TESSERA_STRING_(x)

const char* tessera_version(void) {
  return TESSERA_STRING(TESSERA_VERSION_MAJOR) "." TESSERA_STRING(TESSERA_VERSION_MINOR) "." TESSERA_STRING(
      TESSERA_VERSION_PATCH);
}

}  // extern "C"
