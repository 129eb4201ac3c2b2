// The CUDA text of score programs, compiled by NVRTC: no local memory, no spills.
#include <gtest/gtest.h>

#include <string>

#include "core/score/cuda_programs.hpp"
#include "core/score/cuda_text.hpp"
#include "cuda/runtime/nvrtc.hpp"

namespace tessera::cuda {
namespace {

// A kernel for each program that calls all that a program has, for one pair a thread.
std::string source_of_all(const std::vector<testing::CudaProgram>& programs) {
  std::string source = R"(#include "tessera/attention/score/program.cuh"
namespace tessera {
struct Sink {
  float* to;
  template <int kLoad, int kTensor, class... Index>
  TESSERA_DEVICE void add(bool inside, float adjoint, Index... index) {
    if (inside) to[kLoad] += adjoint * (0.0f + ... + static_cast<float>(index));
  }
};
template <class Program>
TESSERA_DEVICE void run(const ScoreProgramParams& p, const ProgramPlace& first, const float* s, float* out) {
  ProgramPlace at = first;
  at.j += threadIdx.x;
  const auto row = Program::row(p, at);
  const auto column = Program::column(p, at);
  const float x = s[at.j];
  Program::check(p, at);
  Sink sink{out};
  out[64 + 2 * at.j] = Program::visible(p, row, column, at, x) ? Program::score(p, row, column, at, x) : -infinity();
  out[65 + 2 * at.j] =
      Program::gradient(p, Program::gradient_row(p, at), Program::gradient_column(p, at), at, s[2 * at.j], x, sink);
}
}
)";
  for (size_t n = 0; n < programs.size(); ++n) {
    const std::string name = "Program" + std::to_string(n);
    source += cuda_text(*programs[n].checked, programs[n].dtypes, name.c_str());
    source +=
        "extern \"C\" __global__ void run_" + name +
        "(const __grid_constant__ tessera::ScoreProgramParams p, const __grid_constant__ tessera::ProgramPlace at,"
        " const float* s, float* out) {\n  tessera::run<tessera::program::" +
        name + ">(p, at, s, out);\n}\n";
  }
  return source;
}

class CudaScorePrograms : public ::testing::TestWithParam<int32_t> {};

TEST_P(CudaScorePrograms, CompileWithoutLocalMemory) {
  CompilerInfo compiler;
  const tessera_status found = open_compiler(compiler);
  if (found.code != TESSERA_OK) GTEST_SKIP() << found.message;
  const std::vector<testing::CudaProgram> programs = testing::cuda_programs(testing::kDrawnForNvrtc);
  Binary first;
  std::string log;
  const tessera_status status = compile_kernel(source_of_all(programs), "run_Program0", GetParam(), first, &log);
  ASSERT_EQ(status.code, TESSERA_OK) << status.message << "\n" << log;
  for (size_t n = 0; n < programs.size(); ++n) {
    Binary binary;
    ASSERT_TRUE(read_ptxas_log(log, "run_Program" + std::to_string(n), binary)) << programs[n].what;
    EXPECT_EQ(binary.stack_bytes, 0) << programs[n].what;
    EXPECT_EQ(binary.spill_bytes, 0) << programs[n].what;
  }
}

INSTANTIATE_TEST_SUITE_P(Score, CudaScorePrograms, ::testing::Values(80, 90),
                         [](const auto& arch) { return target_name(arch.param); });

}  // namespace
}  // namespace tessera::cuda
