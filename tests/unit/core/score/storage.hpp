// Bound tensors for a program of the tests.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/convert.hpp"
#include "core/score/bound.hpp"
#include "core/score/cuda_programs.hpp"
#include "core/score/definitions.hpp"

namespace tessera::testing {

// The world's tensors in the element types of a program, which the world's own elements are rounded to.
struct Storage {
  core::score::Bound bound;
  std::map<std::string, std::vector<char>> bytes;

  Storage(const CudaProgram& program, World& world) {
    bound.checked = program.checked;
    const core::score::Program& names = program.checked->program;
    for (size_t n = 0; n < names.tensors.size(); ++n) {
      WorldTensor& tensor = world.tensors.at(names.tensors[n].text);
      const int32_t dtype = program.dtypes[n];
      const size_t size = tessera_dtype_bytes(static_cast<tessera_dtype>(dtype));
      std::vector<char>& to = bytes[names.tensors[n].text];
      to.resize(size * tensor.data.size());
      core::score::BoundTensor& of = bound.tensors[n];
      of.data = to.data(), of.dtype = dtype, of.rank = static_cast<int32_t>(tensor.shape.size());
      int64_t stride = static_cast<int64_t>(size);
      for (size_t axis = tensor.shape.size(); axis-- > 0; stride *= tensor.shape[axis]) {
        of.shape[axis] = tensor.shape[axis], of.stride_bytes[axis] = stride;
      }
      for_each_element(of, [&](const int64_t* index, int64_t at) {
        double& element = tensor.data[static_cast<size_t>(at)];
        if (names.tensors[n].type == core::score::Type::kFloat) {
          core::store(dtype, to.data(), at, element);
        } else {
          const int64_t integer = static_cast<int64_t>(element);  // its low bytes are the narrower types'
          std::memcpy(to.data() + at * static_cast<int64_t>(size), &integer, size);
        }
        element = core::score::load_element(of, index);
      });
    }
    bound.num_tensors = static_cast<int>(names.tensors.size());
    for (size_t n = 0; n < names.scalars.size(); ++n) bound.scalars[n] = world.scalars.at(names.scalars[n].text);
  }
};

}  // namespace tessera::testing
