// op_tests [--case "dtype=bf16 b=2 sq=65 ..." | --cases FILE] [--backend cpu|cuda|all] [gtest's options]: one case, a
// file of them, or all tests.
#include <gtest/gtest.h>

#include <cstring>

#include "check.hpp"
#include "crash_report.hpp"

int main(int argc, char** argv) {
  tessera::testing::install_crash_report();
  const char* one_case = nullptr;
  const char* cases = nullptr;
  const char* backend = "";
  for (int n = 1; n + 1 < argc; ++n) {
    if (std::strcmp(argv[n], "--case") == 0) one_case = argv[n + 1];
    if (std::strcmp(argv[n], "--cases") == 0) cases = argv[n + 1];
    if (std::strcmp(argv[n], "--backend") == 0) backend = argv[n + 1];
  }
  if (one_case) return tessera::testing::replay_main(one_case, backend);
  if (cases) return tessera::testing::replay_file_main(cases, backend);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
