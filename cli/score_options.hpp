// A score program from the command line, and what its names stand for.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/score/program.hpp"
#include "tensor.hpp"
#include "tessera/tessera.h"

namespace tessera::cli {

// A program with what it names: of a call, or of a plan, whose tensors have no memory.
struct ScoreProgram {
  std::shared_ptr<tessera_program> handle;
  std::vector<std::string> names;           // of the tensors
  std::vector<core::score::Name> declared;  // of the tensors, and of the scalars
  std::vector<Tensor> tensors;              // those of rank 0 as [1]
  std::vector<Shape> shapes;                // as given: of rank 0 empty
  std::vector<Tensor> gradients;            // as many; absent: not requested
  std::vector<std::string> files;           // of the gradients
  std::vector<double> scalars;

  // SCORE or MASK, in its canonical form.
  std::string text(tessera_program_text which) const;
  // For a plan of the backward pass: gradients of all floating-point tensors, without memory.
  void ask_for_gradients();
  void describe(tessera_problem& problem) const;
  void add_to(tessera_buffers& buffers) const;
};

class ScoreOptions {
 public:
  void add_to(CLI::App& command);
  // Adds the flag of gradients' files.
  void add_gradients_to(CLI::App& command);

  // NULL: no program was given. `of_layouts`: a tensor may be "float32[8, 1024]" instead of a file. Throws WrongUse.
  std::shared_ptr<ScoreProgram> program(bool of_layouts) const;
  bool has_gradients() const { return !gradient_files_.empty(); }

 private:
  std::string score_, mask_;
  std::vector<std::string> bindings_, gradient_files_;  // NAME=VALUE, NAME=FILE
};

}  // namespace tessera::cli
