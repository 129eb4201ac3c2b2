// A definition of the table (definitions.hpp) as a program of the library.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "core/score/definitions.hpp"
#include "core/score/parse.hpp"
#include "tessera/tessera.h"

namespace tessera::test {

// The caller releases it. `parsed` receives its text, parsed with the world's names: the program names its tensors and
// scalars in their order.
inline tessera_program* program_of(const testing::Definition& definition, const testing::World& world,
                                   core::score::Program& parsed) {
  EXPECT_EQ(core::score::parse(definition.score, definition.mask, world.names(), parsed).code, TESSERA_OK);
  std::vector<tessera_program_name> names;
  for (const core::score::Name& name : parsed.tensors) {
    names.push_back({name.text.c_str(), static_cast<std::int32_t>(name.type), name.rank});
  }
  for (const core::score::Name& name : parsed.scalars) {
    names.push_back({name.text.c_str(), static_cast<std::int32_t>(name.type), TESSERA_SCALAR_RANK});
  }
  tessera_program* program = nullptr;
  const tessera_status status = tessera_program_create(definition.score, definition.mask, names.data(),
                                                       static_cast<std::int32_t>(names.size()), &program);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message;
  return program;
}

}  // namespace tessera::test
