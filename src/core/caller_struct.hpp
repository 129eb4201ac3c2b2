// Structs that the caller fills in begin with their own size and grow at their end from version to version. They are
// read from older headers, whose missing members have their defaults, and from newer ones up to the last member that
// this library knows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/status.hpp"
#include "tessera/tessera.h"

namespace tessera::core {

// Every version's structs are smaller: a larger `struct_size` is uninitialised memory.
inline constexpr size_t kLargestStruct_bytes = 16384;

// `known` is initialised with defaults. It receives the common prefix of both structs, and the smaller of their sizes.
// `oldest_bytes`: the size that every version has. `initialised_by` ends the message that refuses an uninitialised
// struct.
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
// NULL: an executor with no member set.
tessera_status read_executor(const tessera_executor* given, tessera_executor& known);

}  // namespace tessera::core
