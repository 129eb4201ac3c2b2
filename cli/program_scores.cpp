#include "program_scores.hpp"

#include <fmt/format.h>

#include <utility>

#include "bound_program.hpp"
#include "core/score/evaluate.hpp"
#include "error.hpp"

namespace tessera::cli {

namespace score = core::score;

struct ProgramScores::State {
  BoundProgram bound;
  std::int64_t length;
  score::Bindings bindings{};
  std::unique_ptr<score::Evaluator> evaluator{};
};

ProgramScores::ProgramScores(std::shared_ptr<const ScoreProgram> program, std::int64_t length)
    : state_(std::make_shared<State>(State{.bound = BoundProgram(std::move(program)), .length = length})) {
  State& state = *state_;
  state.bindings.element = [&state](int tensor, const std::int64_t* index, bool& read) {
    return state.bound.element(tensor, index, read);
  };
  state.bindings.scalar = [&state](int scalar) { return state.bound.scalars[static_cast<std::size_t>(scalar)]; };
  state.evaluator = std::make_unique<score::Evaluator>(state.bound.program, state.bindings);
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
  const int mask = state_->bound.program.mask;
  return mask < 0 || value(mask, i, j, 0) != 0;
}

double ProgramScores::score(std::int64_t i, std::int64_t j, double s) const {
  const int score = state_->bound.program.score;
  return score < 0 ? s : value(score, i, j, s);
}

}  // namespace tessera::cli
