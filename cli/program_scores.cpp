#include "program_scores.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/score/evaluate.hpp"
#include "core/score/parse.hpp"
#include "error.hpp"

namespace tessera::cli {

namespace score = core::score;

struct ProgramScores::State {
  std::shared_ptr<const ScoreProgram> given;
  std::int64_t length;
  score::Program program{};
  std::vector<std::size_t> tensors{};  // of each name of `program`: its place in given->tensors
  std::vector<double> scalars{};
  score::Bindings bindings{};
  std::unique_ptr<score::Evaluator> evaluator{};

  double element(int tensor, const std::int64_t* index, bool& read) const {
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
};

ProgramScores::ProgramScores(std::shared_ptr<const ScoreProgram> program, std::int64_t length)
    : state_(std::make_shared<State>(State{.given = std::move(program), .length = length})) {
  State& state = *state_;
  const tessera_status status =
      score::parse(state.given->text(TESSERA_PROGRAM_SCORE), state.given->text(TESSERA_PROGRAM_MASK),
                   state.given->declared, state.program);
  if (status.code != TESSERA_OK) throw Failure(status.message);
  const auto place = [&](const score::Name& name) {
    std::size_t tensors = 0, scalars = 0;
    for (const score::Name& known : state.given->declared) {
      if (known.text == name.text) break;
      ++(known.is_tensor ? tensors : scalars);
    }
    return name.is_tensor ? tensors : scalars;
  };
  for (const score::Name& name : state.program.tensors) state.tensors.push_back(place(name));
  for (const score::Name& name : state.program.scalars) state.scalars.push_back(state.given->scalars[place(name)]);
  state.bindings.element = [&state](int tensor, const std::int64_t* index, bool& read) {
    return state.element(tensor, index, read);
  };
  state.bindings.scalar = [&state](int scalar) { return state.scalars[static_cast<std::size_t>(scalar)]; };
  state.evaluator = std::make_unique<score::Evaluator>(state.program, state.bindings);
}

double ProgramScores::value(int place, std::int64_t i, std::int64_t j, double s) const {
  score::Evaluator& evaluator = *state_->evaluator;
  evaluator.begin({.s = s, .i = i, .j = j, .q_pos = i, .len_q = state_->length, .len_k = state_->length});
  const double result = evaluator.value(place);
  if (evaluator.read_outside()) {
    throw WrongUse(
        fmt::format("--score-mod, --mask-mod: an index is outside its tensor for query {} and key {}", i, j));
  }
  return result;
}

bool ProgramScores::visible(std::int64_t i, std::int64_t j) const {
  const int mask = state_->program.mask;
  return mask < 0 || value(mask, i, j, 0) != 0;
}

double ProgramScores::score(std::int64_t i, std::int64_t j, double s) const {
  const int score = state_->program.score;
  return score < 0 ? s : value(score, i, j, s);
}

}  // namespace tessera::cli
