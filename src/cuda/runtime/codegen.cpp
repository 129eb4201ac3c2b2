#include "cuda/runtime/codegen.hpp"

namespace tessera::cuda {

std::string symbol_of(const KernelSpec& spec) { return std::string("tessera_") + spec.name; }

std::string source_of(const KernelSpec& spec) {
  const std::string name = spec.name;
  std::string params = std::string("tessera::") + spec.params, program;
  if (!spec.program.empty()) {
    const std::string size = std::to_string(spec.program_params_bytes);
    program = "\n" + spec.program + "\nnamespace tessera {\nnamespace program {\nstruct Params : ProgrammedParams<" +
              params + "> {};\nstatic_assert(sizeof(Params) == " + size + ", \"as the host launches it\");\n}\n" +
              "template <>\nstruct ProgramTypes<true> {\n  using Program = program::ScoreProgram;\n" +
              "  using Params = program::Params;\n};\n}  // namespace tessera\n";
    params = "tessera::program::Params";
  }
  const std::string bounds = std::to_string(spec.threads) + ", " + std::to_string(spec.min_blocks_per_sm);
  const std::string cluster = spec.cluster > 1 ? " __cluster_dims__(" + std::to_string(spec.cluster) + ", 1, 1)" : "";
  return std::string("#include \"") + spec.header + "\"\n" + program + "\nstatic_assert(" + spec.claim +
         ", \"as the host launches it\");\n\nextern \"C\" __global__ void __launch_bounds__(" + bounds + ")" + cluster +
         "\n" + symbol_of(spec) + "(const __grid_constant__ " + params + " p) {\n  tessera::" + name + "<" +
         spec.config + ">(p);\n}\n";
}

}  // namespace tessera::cuda
