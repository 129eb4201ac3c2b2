// What a score program makes of a pair's score, in float64, by the library's evaluation of one pair.
#pragma once

#include <cstdint>
#include <memory>

#include "score_options.hpp"

namespace tessera::cli {

// For one head of N queries and N keys: b, h and h_kv are 0.
class ProgramScores {
 public:
  ProgramScores(std::shared_ptr<const ScoreProgram> program, std::int64_t length);

  // The mask's answer and the new score. Each throws WrongUse for an index outside its tensor.
  bool visible(std::int64_t i, std::int64_t j) const;
  double score(std::int64_t i, std::int64_t j, double s) const;

 private:
  struct State;
  double value(int place, std::int64_t i, std::int64_t j, double s) const;

  std::shared_ptr<State> state_;
};

}  // namespace tessera::cli
