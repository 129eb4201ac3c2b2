// The CPU's kernels with every program of the table against the oracle: forward, decoding, gradients, on all
// instruction sets of this machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/score/programmed.hpp"

namespace tessera::test {
namespace {

using testing::name_for_tests;

std::vector<std::int32_t> isas() {
  std::vector<std::int32_t> all;
  const std::int32_t limit = std::min<std::int32_t>(cpu().isa_limit, TESSERA_ISA_AVX512_BF16);
  for (std::int32_t isa = TESSERA_ISA_BASELINE; isa <= limit; ++isa) all.push_back(isa);
  return all;
}

void check(Programmed& call, bool with_backward, const char* expected_kernel) {
  call.run_oracle();
  for (const std::int32_t isa : isas()) {
    Device device = cpu();
    device.isa = isa, device.vector_isa = 0;
    std::string kernel;
    const auto results = call.run(device, with_backward, kernel, Programmed::execute_here);
    EXPECT_EQ(kernel, expected_kernel);
    expect_near(call, results, tessera_isa_name(isa));
  }
}

class CpuKernelsWith : public ::testing::TestWithParam<size_t> {};

TEST_P(CpuKernelsWith, GiveTheOraclesOutputsAndGradients) {
  for (const bool bf16 : {false, true}) {
    Programmed call(GetParam(), bf16, 40);
    check(call, true, "tiled");
  }
}
TEST_P(CpuKernelsWith, DecodeAsTheOracle) {
  Programmed call(GetParam(), false, 3);
  check(call, false, "decode");
}

std::string name_of(const ::testing::TestParamInfo<size_t>& info) { return name_for_tests(info.param); }
INSTANTIATE_TEST_SUITE_P(Definitions, CpuKernelsWith, ::testing::Range<size_t>(0, definitions().size()), name_of);

}  // namespace
}  // namespace tessera::test
