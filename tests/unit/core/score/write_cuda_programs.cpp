// Writes a C++ file with the CUDA text of each program, and a table of them (cuda_text_table.hpp).
#include <cstdio>
#include <fstream>
#include <string>

#include "core/score/cuda_programs.hpp"
#include "core/score/cuda_text.hpp"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "write_score_programs: %d arguments, accepted 1: the file to write\n", argc - 1);
    return 2;
  }
  std::string text, table;
  size_t n = 0;
  for (const tessera::testing::CudaProgram& program :
       tessera::testing::cuda_programs(tessera::testing::kDrawnForHost)) {
    const std::string name = "Program" + std::to_string(n++);
    text += cuda_text(*program.checked, program.dtypes, {n % 2 != 0, n % 3 != 0 ? ~0u : 0u}, name.c_str()) + "\n";
    table += "    entry_of<program::" + name + ">(),\n";
  }
  std::ofstream file(argv[1]);
  file << text << "#include \"core/score/cuda_text_table.hpp\"\n\nnamespace tessera::testing {\n\n"
       << "const CudaTextEntry kCudaTexts[] = {\n"
       << table << "};\n\n}  // namespace tessera::testing\n";
  file.close();
  if (file) return 0;
  std::fprintf(stderr, "write_score_programs: cannot write %s\n", argv[1]);
  return 1;
}
