#include "bound_program.hpp"

#include <utility>

#include "core/score/parse.hpp"
#include "error.hpp"

namespace tessera::cli {

namespace score = core::score;

BoundProgram::BoundProgram(std::shared_ptr<const ScoreProgram> program_given) : given(std::move(program_given)) {
  const tessera_status status =
      score::parse(given->text(TESSERA_PROGRAM_SCORE), given->text(TESSERA_PROGRAM_MASK), given->declared, program);
  if (status.code != TESSERA_OK) throw Failure(status.message);
  bind();
}

BoundProgram::BoundProgram(std::shared_ptr<const ScoreProgram> program_given, score::Program other)
    : given(std::move(program_given)), program(std::move(other)) {
  bind();
}

void BoundProgram::bind() {
  const auto place = [&](const score::Name& name) {
    std::size_t of_tensors = 0, of_scalars = 0;
    for (const score::Name& known : given->declared) {
      if (known.text == name.text) break;
      ++(known.is_tensor ? of_tensors : of_scalars);
    }
    return name.is_tensor ? of_tensors : of_scalars;
  };
  for (const score::Name& name : program.tensors) tensors.push_back(place(name));
  for (const score::Name& name : program.scalars) scalars.push_back(given->scalars[place(name)]);
}

double BoundProgram::element(int tensor, const std::int64_t* index, bool& read) const {
  const score::Name& name = program.tensors[static_cast<std::size_t>(tensor)];
  const Tensor& data = given->tensors[tensors[static_cast<std::size_t>(tensor)]];
  std::int64_t place = 0;
  read = true;
  for (int axis = 0; axis < name.rank; ++axis) {
    const auto extent = static_cast<std::size_t>(axis);
    if (index[axis] < 0 || index[axis] >= data.shape[extent]) return read = false, 0.0;
    place += index[axis] * data.strides[extent];
  }
  switch (data.dtype) {
    case TESSERA_INT32:
      return data.as<std::int32_t>()[place];
    case TESSERA_INT64:
      return static_cast<double>(data.as<std::int64_t>()[place]);
    case TESSERA_BOOL:
      return data.as<std::uint8_t>()[place];
    default:
      return element_at(data, place);
  }
}

}  // namespace tessera::cli
