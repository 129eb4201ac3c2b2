// Which instruction sets a CPU has, by the newest of them.
#pragma once

#include <cstdint>

#include "tessera/tessera.h"

namespace tessera::core {

// Each set of one kind of processor includes those before it; the baseline is that of all.
constexpr bool has_isa(int32_t newest, int32_t isa) {
  if (isa == TESSERA_ISA_BASELINE) return true;
  const bool of_one_kind = (isa >= TESSERA_ISA_NEON) == (newest >= TESSERA_ISA_NEON);
  return of_one_kind && isa > TESSERA_ISA_BASELINE && isa <= newest;
}

}  // namespace tessera::core
