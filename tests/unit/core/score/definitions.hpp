// Typical score programs, each with its meaning in plain C++: one table for all tests of the language and of its
// implementations.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/score/evaluate.hpp"
#include "core/score/program.hpp"

namespace tessera::testing {

// A named tensor's elements, in the order of its axes.
struct WorldTensor {
  core::score::Name name;
  std::vector<int64_t> shape;
  std::vector<double> data;

  double at(std::initializer_list<int64_t> index) const;
  bool holds(const int64_t* index) const;
  int64_t offset(const int64_t* index) const;
};

struct WorldSizes {
  int64_t batch = 2, heads = 4, heads_kv = 2, len_q = 40, len_k = 56;
};

// What programs of the table are evaluated over: sizes, and a tensor or a number behind each name.
struct World {
  int64_t batch, heads, heads_kv, len_q, len_k;
  std::map<std::string, WorldTensor> tensors;
  std::map<std::string, double> scalars;

  explicit World(uint64_t seed, int64_t queries = WorldSizes().len_q, int64_t keys = WorldSizes().len_k);
  // `text`: of its tensors, those whose names are words of the text.
  World(uint64_t seed, const WorldSizes& sizes, std::string_view text);
  std::vector<core::score::Name> names() const;
  // Of a program's names; it must outlive what is returned.
  core::score::Bindings bindings(const core::score::Program& program) const;
  core::score::Inputs pair(int64_t b, int64_t h, int64_t i, int64_t j, double s) const;
  double operator()(const char* tensor, std::initializer_list<int64_t> index) const {
    return tensors.at(tensor).at(index);
  }
};

using Pair = core::score::Inputs;
struct Definition {
  const char* name;
  const char* score;  // "": the score stays
  const char* mask;   // "": every key is visible
  double (*new_score)(const Pair& p, const World& w);
  bool (*visible)(const Pair& p, const World& w);
  bool smooth = true;  // central differences may be held against the gradient everywhere
};

const std::vector<Definition>& definitions();
// Whether a name is a word of the text.
bool mentions(std::string_view text, std::string_view name);
std::string name_for_tests(size_t definition);  // of its place: letters and digits of its name

}  // namespace tessera::testing
