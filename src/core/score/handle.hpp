// tessera_program: a checked program and the names that its creator declared.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/score/checked.hpp"
#include "tessera/tessera.h"

struct tessera_program {
  std::atomic<int64_t> references{1};
  std::shared_ptr<const tessera::core::score::Checked> checked;
  std::vector<tessera::core::score::Name> tensors,
      scalars;  // as declared; their indices are those of captured[n] and scalars[n]
};

namespace tessera::core::score {

// The index of a name among those that a program's creator declared: its place in captured or scalars.
int place_of(std::span<const Name> declared, const Name& name);

// Writes a program over a handle's names, or what remains of it, into the area of a plan.
void keep(const Checked& checked, const tessera_program& handle, tessera_plan_program& kept);

}  // namespace tessera::core::score
