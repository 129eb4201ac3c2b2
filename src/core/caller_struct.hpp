// Structs that the caller fills in grow at their end from version to version and begin with their own size: read from older
// headers, whose missing members stand at their defaults, and from newer ones as far as this library knows them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/status.hpp"
#include "tessera/tessera.h"

namespace tessera::core {

// Beyond this no version goes: a larger `struct_size` is memory that nothing initialised.
inline constexpr size_t kLargestStruct_bytes = 16384;

// `known` comes with its defaults, and keeps the smaller of both sizes: as much as the caller and this library know.
// `oldest_bytes`: what every version has. `initialised_by` ends the refusal of a struct that nothing initialised.
template <class T>
tessera_status read_struct(const char* name, const T& given, size_t oldest_bytes, const char* initialised_by,
                           T& known) {
  const size_t given_bytes = given.struct_size;
  if (given_bytes == 0) {
    return invalid("%s: struct_size 0, accepted what %s sets: nothing initialised this struct", name, initialised_by);
  }
  if (given_bytes < oldest_bytes || given_bytes > kLargestStruct_bytes) {
    return invalid("%s: struct_size %zu, accepted %zu .. %zu, as %s sets it", name, given_bytes, oldest_bytes,
                   kLargestStruct_bytes, initialised_by);
  }
  const char* bytes = reinterpret_cast<const char*>(&given);
  const auto* unknown =
      std::find_if(bytes + std::min(given_bytes, sizeof(T)), bytes + given_bytes, [](char byte) { return byte != 0; });
  if (unknown != bytes + given_bytes) {
    return invalid(
        "%s: a member at byte %td is set that version %s does not know, whose struct_size is %zu; accepted 0 there",
        name, unknown - bytes, tessera_version(), sizeof(T));
  }
  std::memcpy(&known, &given, std::min(given_bytes, sizeof(T)));
  known.struct_size = std::min(given_bytes, sizeof(T));
  return ok();
}

tessera_status read_problem(const tessera_problem* given, tessera_problem& known);
tessera_status read_buffers(const tessera_buffers* given, tessera_buffers& known);
tessera_status read_combine_call(const tessera_combine_call* given, tessera_combine_call& known);
// NULL: an executor that has no member.
tessera_status read_executor(const tessera_executor* given, tessera_executor& known);

}  // namespace tessera::core
