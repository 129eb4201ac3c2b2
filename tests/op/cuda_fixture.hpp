// What the tests of a GPU's own ways to go wrong share.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "case.hpp"
#include "execute.hpp"
#include "gpu_call.hpp"
#include "inputs.hpp"

namespace tessera::testing {

using Bits = std::vector<std::vector<std::byte>>;

inline Inputs inputs_of(const char* text) { return make_inputs(legalised(*parse_case(text, nullptr))); }

inline tessera_plan plan_of(const Call& call, tessera_direction direction, bool check_indices = false) {
  tessera_device device = gpu_device();
  device.check_indices = check_indices;
  const tessera_problem problem = problem_of(call, direction);
  tessera_plan plan{};
  const tessera_status status = tessera_make_plan(&problem, &device, &plan);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message;
  return plan;
}

// Skipped, with the reason, where there is no GPU.
class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
    gpu_ = &Gpu::get();
  }
  void expect_ok(const tessera_status& status) { EXPECT_EQ(status.code, TESSERA_OK) << status.message; }

  Gpu* gpu_ = nullptr;
};

}  // namespace tessera::testing
