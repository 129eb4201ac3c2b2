// Shared by the tests of faults that only a GPU can have.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <iterator>
#include <vector>

#include "case.hpp"
#include "execute.hpp"
#include "gpu_call.hpp"
#include "inputs.hpp"

namespace tessera::testing {

using Bits = std::vector<std::vector<std::byte>>;

// Calls of one, two and three launches.
inline constexpr const char* kStreamCases[] = {
    "dtype=bf16 backward=1 deterministic=1 b=2 sq=300 sk=400 hq=4 hkv=2 d=64 dv=64 causal=1",
    "dtype=f32 backward=1 deterministic=1 b=2 sq=70 sk=140 hq=4 hkv=2 d=32 dv=40 bias=hqk d_bias=1 sink=1 d_sink=1",
    "dtype=f16 b=2 sq=1 sk=4001 hq=8 hkv=2 d=128 dv=128",
    "dtype=bf16 backward=1 deterministic=1 b=2 sq=90 sk=150 hq=4 hkv=2 d=64 dv=64 dropout=0.3 state=1 low=1",
};
// A dynamic persistent scheduler: its counter is cleared by the call.
inline constexpr const char* kCounterCase =
    "dtype=bf16 b=40 sq=300 sk=300 hq=8 hkv=2 d=128 dv=128 q=packed k=packed causal=1";

inline std::vector<tessera_direction> directions(const Case& c) {
  if (c.backward) return {TESSERA_FORWARD, TESSERA_BACKWARD};
  return {TESSERA_FORWARD};
}

inline Inputs inputs_of(const char* text) { return make_inputs(legalised(*parse_case(text, nullptr))); }

inline tessera_plan plan_of(const Call& call, tessera_direction direction, tessera_device device = gpu_device()) {
  const tessera_problem problem = problem_of(call, direction);
  tessera_plan plan{};
  const tessera_status status = tessera_make_plan(&problem, &device, &plan);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message;
  return plan;
}

// A direction of a case, its plan for the first GPU and its results there.
struct Direct {
  Call call;
  tessera_direction direction;
  tessera_plan plan;
  Bits expected;
};

// All directions of kStreamCases and kCounterCase.
inline std::vector<Direct> run_directly() {
  std::vector<const char*> texts(std::begin(kStreamCases), std::end(kStreamCases));
  texts.push_back(kCounterCase);
  std::vector<Direct> directs;
  for (const char* const text : texts) {
    const Inputs in = inputs_of(text);
    for (const tessera_direction direction : directions(in.c)) {
      Direct& direct = directs.emplace_back(make_call(in), direction, tessera_plan{}, Bits{});
      for (const tessera_direction step : {TESSERA_FORWARD, direction}) {
        const RunResult result = run(direct.call, step, {.place = kGpu});
        EXPECT_TRUE(result.ok()) << result.why();
      }
      direct.plan = plan_of(direct.call, direction);
      direct.expected = output_bytes(direct.call, direction);
    }
  }
  return directs;
}

// Skipped, with the reason, without a GPU.
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
