// op_tests [--case "dtype=bf16 b=2 sq=65 ..."] [gtest's options]: one case, or all tests.
#include <gtest/gtest.h>

#include <cstring>

#include "check.hpp"
#include "crash_report.hpp"

int main(int argc, char** argv) {
  tessera::testing::install_crash_report();
  if (argc == 3 && std::strcmp(argv[1], "--case") == 0) return tessera::testing::replay_main(argv[2]);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
