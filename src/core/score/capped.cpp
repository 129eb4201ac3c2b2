#include "core/score/capped.hpp"

#include "core/score/facts.hpp"

namespace tessera::core::score {

std::optional<Capped> capped_of(const Program& program) {
  if (!(inputs_of(program, program.score) & input_bit(Op::kS))) return std::nullopt;
  for (int place = program.score; place >= 0; --place) {
    const Value& value = program.values[static_cast<size_t>(place)];
    if (value.op != Op::kTanh || inputs_of(program, program.score, place) & kPairInputs) continue;
    return Capped{value.operands[0], place};
  }
  return std::nullopt;
}

}  // namespace tessera::core::score
