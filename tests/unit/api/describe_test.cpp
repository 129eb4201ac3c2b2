#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support.hpp"

namespace tessera::test {
namespace {

using Json = nlohmann::json;

std::vector<Problem> problems() {
  Problem options = dense_problem();
  options.causal = true;
  options.set_window(3, 4).set_dropout(0.25, ~0ull, 17);
  options.softcap = 30;
  options.bias = layout(float32, {1, 4, 1, 24});
  options.mask = layout(boolean, {1, 1, 16, 24});
  options.alibi_slopes = options.sink = layout(float32, {4});
  return {dense_problem(), packed_problem(), paged_problem(), options, gradient_of(dense_problem())};
}

TEST(Json, ParsesAndSaysWhatThePlanSays) {
  for (const Problem& problem : problems()) {
    const Plan plan = tessera::plan(problem, reference_device());
    const Json json = Json::parse(tessera::json(plan));
    EXPECT_EQ(json["version"], std::string(version()));
    EXPECT_EQ(json["kernel"], "reference");
    const auto answers = candidates(plan);
    ASSERT_EQ(json["candidates"].size(), answers.size());
    for (std::size_t n = 0; n < answers.size(); ++n) {
      EXPECT_EQ(json["candidates"][n]["kernel"], std::string(answers[n].kernel));
      EXPECT_EQ(json["candidates"][n]["reason"], std::string(answers[n].reason));
    }
    EXPECT_EQ(json["workspace_bytes"], plan.workspace_bytes);
    EXPECT_EQ(json["flops"], plan.flops);
    EXPECT_EQ(json["standard_bytes"], plan.standard_bytes);
    EXPECT_EQ(json["device"]["threads"], plan.device.threads);
    EXPECT_EQ(json["device"].contains("vector_isa"), plan.device.vector_isa != 0);  // with AMX
    const Json& said = json["problem"];
    EXPECT_EQ(said["direction"], problem.direction == TESSERA_BACKWARD ? "backward" : "forward");
    EXPECT_EQ(said["scale"], plan.problem.scale);
    EXPECT_EQ(said["causal"], problem.causal != 0);
    EXPECT_EQ(said["dropout_seed"], problem.dropout_seed);
    EXPECT_EQ(said["window_left"], problem.window_left);
    EXPECT_EQ(said["tensors"]["q"]["dtype"], "float32");
    EXPECT_EQ(said["tensors"]["q"]["shape"].size(), static_cast<std::size_t>(problem.q.rank));
    EXPECT_EQ(said["tensors"].contains("bias"), problem.bias.rank != 0);
    EXPECT_EQ(said["tensors"].contains("page_table"), problem.page_table.rank != 0);
  }
}

TEST(Json, EscapesText) {
  Device device = reference_device();
  std::strcpy(device.name, "a \"CPU\" \\ with\ttab");
  const Plan plan = tessera::plan(dense_problem(), device);
  EXPECT_EQ(Json::parse(tessera::json(plan))["device"]["name"], plan.device.name);
}

TEST(Describe, SaysWhatAPersonAsks) {
  const Plan plan = tessera::plan(problems()[3], reference_device());
  const std::string text = describe(plan);
  for (const char* part :
       {"forward, float32", "causal (bottom-right)", "window 3 left, 4 right", "softcap 30", "dropout 0.25", "bias",
        "ALiBi", "mask", "sink", "reference", "chosen: the device asks for it",
        "refused: the device asks for reference", "workspace", "FLOP", "standard attention"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in:\n" << text;
  }
  EXPECT_EQ(text.back(), '\n');
}

TEST(Describe, CutsToTheSizeGivenAndTellsTheLength) {
  const Plan plan = tessera::plan(dense_problem(), reference_device());
  for (const auto write : {tessera_plan_describe, tessera_plan_json}) {
    const std::size_t length = write(&plan, nullptr, 0);
    std::vector<char> whole(length + 1, 'x'), part(10, 'x');
    EXPECT_EQ(write(&plan, whole.data(), whole.size()), length);
    EXPECT_EQ(std::strlen(whole.data()), length);
    EXPECT_EQ(write(&plan, part.data(), part.size()), length);
    EXPECT_EQ(std::string(part.data()), std::string(whole.data(), 9));
    EXPECT_EQ(write(nullptr, part.data(), part.size()), 0u);
    EXPECT_STREQ(part.data(), "");
  }
}

TEST(Names, AreThoseOfTheHeader) {
  EXPECT_STREQ(tessera_dtype_name(TESSERA_BFLOAT16), "bfloat16");
  EXPECT_STREQ(tessera_dtype_name(-1), "unknown");
  EXPECT_EQ(tessera_dtype_bytes(TESSERA_FLOAT64), 8u);
  EXPECT_EQ(tessera_dtype_bytes(TESSERA_BOOL), 1u);
  EXPECT_EQ(tessera_dtype_bytes(77), 0u);
  EXPECT_STREQ(tessera_isa_name(TESSERA_ISA_AVX512_BF16), "avx512_bf16");
  EXPECT_STREQ(tessera_isa_name(TESSERA_ISA_AMX_BF16), "amx_bf16");
  EXPECT_STREQ(tessera_isa_name(TESSERA_ISA_NEON_BF16 + 1), "unknown");
  EXPECT_STREQ(tessera_kernel_name(TESSERA_KERNEL_DECODE), "decode");
  EXPECT_STREQ(tessera_version(), "0.1.0");
}

}  // namespace
}  // namespace tessera::test
