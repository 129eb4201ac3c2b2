#include "cuda/runtime/codegen.hpp"

namespace tessera::cuda {

std::string symbol_of(const KernelSpec& spec) { return std::string("tessera_") + spec.name; }

std::string source_of(const KernelSpec& spec) {
  const std::string name = spec.name, params = std::string("tessera::") + spec.params;
  const std::string bounds = std::to_string(spec.threads) + ", " + std::to_string(spec.min_blocks_per_sm);
  const std::string cluster = spec.cluster > 1 ? " __cluster_dims__(" + std::to_string(spec.cluster) + ", 1, 1)" : "";
  return std::string("#include \"") + spec.header + "\"\n\nstatic_assert(" + spec.claim +
         ", \"as the host launches it\");\n\nextern \"C\" __global__ void __launch_bounds__(" + bounds + ")" + cluster +
         "\n" + symbol_of(spec) + "(const __grid_constant__ " + params + " p) {\n  tessera::" + name + "<" +
         spec.config + ">(p);\n}\n";
}

}  // namespace tessera::cuda
