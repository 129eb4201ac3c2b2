#include "score.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "core/score/facts.hpp"
#include "core/score/handle.hpp"
#include "core/score/operations.hpp"
#include "error.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tessera::python {
namespace {

using NameRow = std::tuple<std::string, std::string, int32_t>;  // name, type, rank

int32_t type_named(const std::string& type) {
  constexpr const char* kTypes[] = {"float", "int", "bool"};
  for (int32_t n = 0; n < 3; ++n) {
    if (type == kTypes[n]) return n;
  }
  throw Error("names: type \"" + type.substr(0, 80) + "\", accepted \"float\", \"int\" and \"bool\"");
}

template <tessera_program_text which>
std::string text_of(const ScoreProgram& program) {
  std::string text(tessera_program_describe(program.handle.get(), which, nullptr, 0), '\0');
  tessera_program_describe(program.handle.get(), which, text.data(), text.size() + 1);
  return text;
}

// The names of the pair's inputs that the score or the mask depends on.
std::vector<std::string> inputs_of(const ScoreProgram& program) {
  using core::score::Op;
  const core::score::Facts facts = core::score::facts_of(*program.handle->checked);
  std::vector<std::string> names;
  for (int n = 0; n < static_cast<int>(Op::kG); ++n) {
    const Op op{static_cast<uint8_t>(n)};
    if ((facts.score_inputs | facts.mask_inputs) & core::score::input_bit(op)) {
      names.emplace_back(core::score::operation(op).text);
    }
  }
  return names;
}

}  // namespace

ProgramHandle make_program(const std::string& score, const std::string& mask, const std::vector<DeclaredName>& rows) {
  std::vector<tessera_program_name> names;
  for (const DeclaredName& row : rows) names.push_back({row.name.c_str(), type_named(row.type), row.rank});
  for (const std::string* text : {&score, &mask}) {
    const size_t zero = text->find('\0');
    if (zero != text->npos) {
      throw Error((text == &score ? "score" : "mask") + std::string(", column ") + std::to_string(zero + 1) +
                  ": unexpected byte");
    }
  }
  tessera_program* program = nullptr;
  check(
      tessera_program_create(score.c_str(), mask.c_str(), names.data(), static_cast<int32_t>(names.size()), &program));
  return ProgramHandle(program, tessera_program_release);
}

void add_score(nb::module_& m) {
  nb::class_<ScoreProgram>(m, "ScoreProgram")
      .def(
          "__init__",
          [](ScoreProgram* self, const std::string& score, const std::string& mask, const std::vector<NameRow>& rows) {
            std::vector<DeclaredName> names;
            for (const auto& [name, type, rank] : rows) names.push_back({name, type, rank});
            new (self) ScoreProgram{make_program(score, mask, names)};
          },
          "score"_a, "mask"_a, "names"_a)
      .def_prop_ro("score", text_of<TESSERA_PROGRAM_SCORE>)
      .def_prop_ro("mask", text_of<TESSERA_PROGRAM_MASK>)
      .def_prop_ro("gradient", text_of<TESSERA_PROGRAM_GRADIENT>)
      .def_prop_ro("inputs", inputs_of)
      .def_prop_ro("hash", [](const ScoreProgram& program) { return tessera_program_hash(program.handle.get()); });
}

}  // namespace tessera::python
