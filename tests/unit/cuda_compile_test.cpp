// The common kernels of every architecture, compiled: no spill, stack frame or register more than their row allows (a
// little more spill and stack by another compiler than the rows'), and no wgmma that ptxas serialises.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/nvrtc.hpp"
#include "cuda/prebuilt.hpp"

namespace tessera::cuda {
namespace {

class CudaCompile : public testing::TestWithParam<int32_t> {};

TEST_P(CudaCompile, StaysWithinItsRow) {
  CompilerInfo compiler;
  const tessera_status found = open_compiler(compiler);
  if (found.code != TESSERA_OK) GTEST_SKIP() << found.message;
  const int32_t arch = GetParam();
  const bool rows_compiler = compiler.version == kRowsCompiler;
  const int32_t more_spill = rows_compiler ? 0 : kOtherSpillBytes, more_stack = rows_compiler ? 0 : kOtherStackBytes;
  for (const PrebuiltKernel& kernel : prebuilt_kernels(arch, PrebuiltSet::kCommon)) {
    SCOPED_TRACE(std::string(kernel.spec.name) + "<" + kernel.spec.config + "> for " + arch_name(arch));
    Binary binary;
    std::string log;
    const tessera_status status = compile_kernel(source_of(kernel.spec), symbol_of(kernel.spec), arch, binary, &log);
    if (status.code != TESSERA_OK) {
      ADD_FAILURE() << status.message << "\n" << log;
      continue;
    }
    EXPECT_LE(binary.registers, kernel.registers);
    EXPECT_LE(binary.spill_bytes, kernel.spill_bytes + more_spill) << log;
    EXPECT_LE(binary.stack_bytes, kernel.stack_bytes + more_stack) << log;
    EXPECT_EQ(binary.wgmma_serialized, 0) << log;
    EXPECT_EQ(binary.arch, arch) << "NVRTC " << version_text(compiler.version) << " compiles for an older one";
  }
}

INSTANTIATE_TEST_SUITE_P(Prebuilt, CudaCompile, testing::ValuesIn(prebuilt_archs()),
                         [](const auto& row) { return arch_name(row.param); });

}  // namespace
}  // namespace tessera::cuda
