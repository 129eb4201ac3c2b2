#include "core/score/cuda_programs.hpp"

#include <map>
#include <random>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "core/score/definitions.hpp"
#include "core/score/drawn.hpp"
#include "core/score/parse.hpp"
#include "tessera/tessera.h"

namespace tessera::testing {
namespace {

using core::score::Type;

// Every element type that a kernel reads.
int32_t dtype_of(const core::score::Name& name) {
  static const std::map<std::string_view, int32_t> kSpecial = {
      {"key_bias", TESSERA_BFLOAT16}, {"query_bias", TESSERA_FLOAT16}, {"embedding", TESSERA_FLOAT16},
      {"id", TESSERA_INT8},           {"doc", TESSERA_INT64},          {"span", TESSERA_INT16},
      {"used", TESSERA_UINT8}};
  if (const auto found = kSpecial.find(name.text); found != kSpecial.end()) return found->second;
  return name.type == Type::kFloat ? TESSERA_FLOAT32 : name.type == Type::kInt ? TESSERA_INT32 : TESSERA_BOOL;
}

}  // namespace

std::vector<CudaProgram> cuda_programs(int drawn) {
  const std::vector<core::score::Name> names = World(1).names();
  std::vector<CudaProgram> all;
  // Whether the texts are a program: a drawn one may be too long, or divide by a constant 0.
  const auto add = [&](const std::string& what, const std::string& score, const std::string& mask) {
    core::score::Program program;
    if (core::score::parse(score, mask, names, program).code != TESSERA_OK) return false;
    CudaProgram made{what, nullptr, {}};
    if (check(program, made.checked).code != TESSERA_OK) return false;
    for (const core::score::Name& tensor : made.checked->program.tensors) made.dtypes.push_back(dtype_of(tensor));
    all.push_back(std::move(made));
    return true;
  };
  for (const Definition& definition : definitions()) {
    if (!add(definition.name, definition.score, definition.mask)) throw std::runtime_error(definition.name);
  }
  for (const auto& [score, mask] :
       {std::pair{"s + relative[h, i - j]", ""},
        {"s + place[i - j]", "j <= i + 3"},
        {"s + relative[h, 40 + j - i] * place[i - j]", ""},
        {"s + (i - j > 3 ? place[i - j - 5] : 0.0)", ""},
        {"j < i ? s + place[i - j - 2] : s", ""},
        {"where(h < 2, place[i - 30], 0.0) + where(b < 1, place[i - 30], s)", ""},
        {"s + embedding[id[b, j] - 1]", "j <= q_pos && keep[b, j + 20]"},
        {"s > 0.0 ? s + place[i - j] : s + key_bias[b, j - 2]", "j < 50 || keep[b, j - 55]"},
        {"s", "where(j < 20, keep[b, j - 5], keep[b, j - 25])"}}) {
    if (!add(std::string(kOutside) + score + "\n" + mask, score, mask)) throw std::runtime_error(score);
  }
  // What depends on s does not count.
  const char* const by_s = "s + place[j - 1] * place[int(s)]";
  if (!add(by_s, by_s, "s < 1.0 || keep[b, -1] || keep[b - 1, j]")) throw std::runtime_error(by_s);
  std::mt19937_64 random(47);
  for (int n = 0; drawn > 0; ++n) {
    const std::string score = expression(Type::kFloat, 1 + n % 4, random);
    const std::string mask = expression(Type::kBool, 1 + n % 3, random);
    drawn -= add(score + "\n" + mask, score, mask);
  }
  return all;
}

}  // namespace tessera::testing
