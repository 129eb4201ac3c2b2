#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

#include "support.hpp"

namespace tessera::test {
namespace {

tessera_candidate candidate(const Plan& plan, const std::string& kernel) {
  for (const tessera_candidate& one : candidates(plan)) {
    if (one.kernel == kernel) return one;
  }
  throw std::out_of_range(kernel);
}

TEST(Plan, FillsInDefaultsAndSizes) {
  Problem problem = dense_problem();
  problem.window_left = std::int64_t{1} << 40;
  problem.dropout_p = 0.1;
  const Plan plan = tessera::plan(problem, reference_device());
  EXPECT_EQ(plan.problem.has_scale, 1);
  EXPECT_EQ(plan.problem.scale, 1 / std::sqrt(8.0));
  EXPECT_EQ(plan.problem.window_left, -1) << "wider than any sequence";
  EXPECT_EQ(plan.problem.dropout_p, 6554.0 / 65536) << "in steps of 2^-16";
  EXPECT_EQ(plan.batch, 2);
  EXPECT_EQ(plan.max_seqlen_q, 16);
  EXPECT_EQ(plan.max_seqlen_k, 24);
  EXPECT_EQ(plan.heads_q, 4);
  EXPECT_EQ(plan.heads_kv, 2);
  EXPECT_EQ(plan.head_dim, 8);
  EXPECT_EQ(plan.head_dim_v, 6);
}

TEST(Plan, SizesOfPackedAndPaged) {
  Problem problem = packed_problem();
  Plan plan = tessera::plan(problem, reference_device());
  EXPECT_EQ(plan.batch, 3);
  EXPECT_EQ(plan.max_seqlen_q, 16) << "all rows may be one sequence's";
  EXPECT_EQ(plan.max_seqlen_k, 24);
  problem.max_seqlen_q = 7;
  problem.max_seqlen_k = 1000;
  plan = tessera::plan(problem, reference_device());
  EXPECT_EQ(plan.max_seqlen_q, 7);
  EXPECT_EQ(plan.max_seqlen_k, 24) << "no more than there are";
  plan = tessera::plan(paged_problem(), reference_device());
  EXPECT_EQ(plan.batch, 2);
  EXPECT_EQ(plan.max_seqlen_k, 24) << "three pages of eight";
}

// [1, N, 4, D] over [1, Nk, 2, D].
Problem self_attention(DType dtype, std::int64_t queries, std::int64_t keys, std::int64_t head_dim) {
  Problem problem;
  problem.q = problem.o = layout(dtype, {1, queries, 4, head_dim});
  problem.k = problem.v = layout(dtype, {1, keys, 2, head_dim});
  return problem;
}

// Plans alone: this machine need not have AMX.
TEST(Plan, AmxServesWhatItIsTheFastestFor) {
  Device device = cpu();
  device.isa = device.isa_limit = TESSERA_ISA_AMX_BF16;
  device.vector_isa = TESSERA_ISA_AVX512;
  struct Row {
    DType dtype;
    std::int64_t queries, keys, head_dim;
    const char* refused;  // "": the tiles serve
  };
  for (const Row& row : {
           Row{bfloat16, 2048, 2048, 128, ""},
           Row{bfloat16, 128, 128, 24, ""},
           Row{bfloat16, 512, 512, 256, ""},
           Row{bfloat16, 20, 4096, 128, "query rows 40, from 128 on"},  // two heads share a KV head
           Row{bfloat16, 1, 4096, 128, ""},                             // decoded
           Row{bfloat16, 100, 4096, 128, "query rows 100, from 128 on"},
           Row{bfloat16, 2048, 100, 128, "keys 100, from 128 on"},
           Row{bfloat16, 2048, 2048, 4, "head sizes of K and V together 8, from 16 on"},
           Row{float16, 2048, 2048, 128, "they support bfloat16"},
           Row{float32, 2048, 2048, 128, "they support bfloat16"},
       }) {
    Problem problem = self_attention(row.dtype, row.queries, row.keys, row.head_dim);
    const bool serves = row.refused[0] == '\0';
    const std::string text = describe(tessera::plan(problem, device));
    EXPECT_EQ(tessera::plan(problem, device).device.isa, serves ? TESSERA_ISA_AMX_BF16 : TESSERA_ISA_AVX512) << text;
    EXPECT_NE(text.find(serves ? "amx_bf16 with bf16 products by tiles"
                               : std::string("avx512, not AMX's tiles (") + row.refused + ")"),
              std::string::npos)
        << text;

    Device asked_for = device;
    asked_for.vector_isa = 0;
    EXPECT_EQ(tessera::plan(problem, asked_for).device.isa, TESSERA_ISA_AMX_BF16) << "as TESSERA_ISA asks";

    // The lengths of a batch may not decide a sequence's bits.
    problem.batch_invariant = 1;
    const bool by_lengths =
        std::string(row.refused).starts_with("query") || std::string(row.refused).starts_with("keys");
    EXPECT_EQ(tessera::plan(problem, device).device.isa == TESSERA_ISA_AMX_BF16, serves || by_lengths);
  }
}

// Keys and values that several items read are packed once, if that needs at most 512 MiB and a call has much work.
TEST(Plan, AmxPacksKeysOnceForSeveralItems) {
  Device device = cpu();
  device.isa = device.isa_limit = TESSERA_ISA_AMX_BF16;
  device.vector_isa = TESSERA_ISA_AVX512;
  struct Row {
    std::int32_t cores;
    std::int64_t batch, queries, keys, heads_q, heads_kv, head_dim;
    bool once;
  };
  for (const Row& row : {
           Row{1, 1, 128, 4096, 8, 2, 128, true},    // four query heads
           Row{1, 2, 4096, 4096, 1, 1, 128, true},   // four items
           Row{1, 2, 4096, 4096, 1, 1, 64, false},   // two of short rows
           Row{1, 2, 1024, 4096, 1, 1, 128, false},  // one
           Row{1, 1, 16, 4096, 32, 4, 64, false},    // one, of eight heads' queries
           Row{1, 1, 1, 4096, 32, 8, 64, false},     // decoded
           Row{1, 30, 4096, 4096, 8, 8, 128, true},  // 480 MiB
           Row{1, 32, 4096, 4096, 8, 8, 128, false}, Row{16, 1, 1024, 1024, 32, 8, 128, false},  // 2048 stages a core
           Row{16, 1, 4096, 4096, 32, 8, 128, true},                                             // 32768
       }) {
    Problem problem;
    problem.q = problem.o = layout(bfloat16, {row.batch, row.queries, row.heads_q, row.head_dim});
    problem.k = problem.v = layout(bfloat16, {row.batch, row.keys, row.heads_kv, row.head_dim});
    device.cores = row.cores;
    const Plan plan = tessera::plan(problem, device);
    const std::int64_t keys_bytes = row.batch * row.keys * row.heads_kv * row.head_dim * 4;
    EXPECT_EQ(plan.shared_bytes >= keys_bytes, row.once) << describe(plan);
    EXPECT_EQ(describe(plan).find("keys and values packed once") != std::string::npos, row.once) << describe(plan);
  }
}

// Every family can be asked for by its name, and by its number if it has one.
TEST(Plan, TakesFamiliesByName) {
  const std::vector<tessera_family> all = families();
  EXPECT_GE(all.size(), 14u);
  for (const tessera_family& family : all) {
    SCOPED_TRACE(family.name);
    EXPECT_TRUE(family.on_cpu || family.on_cuda);
    if (family.kernel != TESSERA_KERNEL_AUTO) {
      EXPECT_STREQ(tessera_kernel_name(family.kernel), family.name);
    }
    Device named = cpu(), numbered = cpu();
    std::memcpy(named.family, family.name, sizeof named.family);
    numbered.kernel = family.kernel;
    Plan by_name, by_number;
    const Status said = try_plan(dense_problem(), named, by_name);
    if (family.kernel == TESSERA_KERNEL_AUTO) {
      if (said.ok()) {
        EXPECT_STREQ(by_name.family, family.name);
      }
      continue;
    }
    const Status same = try_plan(dense_problem(), numbered, by_number);
    EXPECT_EQ(said.code(), same.code());
    EXPECT_EQ(said.message(), same.message());
    if (!said.ok()) continue;
    EXPECT_STREQ(by_name.family, family.name);
    EXPECT_STREQ(by_number.family, family.name);
  }
  tessera_family none;
  EXPECT_EQ(std::string(tessera_family_at(-1, &none).message),
            "index: -1, the library has " + std::to_string(all.size()) + " families, counted from 0");
  Device device = cpu();
  Plan plan;
  std::snprintf(device.family, sizeof device.family, "tiled");
  device.kernel = TESSERA_KERNEL_DECODE;
  EXPECT_EQ(std::string(try_plan(dense_problem(), device, plan).message()),
            "device.family: tiled with device.kernel decode, accepted one of the two, or both alike");
  device.kernel = TESSERA_KERNEL_AUTO;
  std::snprintf(device.family, sizeof device.family, "of_tomorrow");
  EXPECT_TRUE(std::string(try_plan(dense_problem(), device, plan).message())
                  .starts_with("device.family: 'of_tomorrow', accepted decode, tiled, "));
  std::memset(device.family, 'x', sizeof device.family);
  EXPECT_EQ(std::string(try_plan(dense_problem(), device, plan).message()), "device.family: longer than 31 characters");
}

TEST(Plan, EveryCandidateSaysWhy) {
  const Plan plan = tessera::plan(dense_problem(), cpu());
  EXPECT_EQ(candidates(plan).size(), 4u);
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_TILED);
  EXPECT_TRUE(candidate(plan, "tiled").accepted);
  EXPECT_FALSE(candidate(plan, "decode").accepted);
  EXPECT_FALSE(candidate(plan, "reference").accepted);
  EXPECT_STREQ(candidate(plan, "reference").reason, "float64, on one core: on request, or where a problem is float64");
  for (const tessera_candidate& one : candidates(plan)) {
    EXPECT_GT(std::strlen(one.reason), 0u);
    EXPECT_EQ(one.estimate_us > 0, one.accepted != 0) << one.kernel;
  }
  EXPECT_TRUE(launches(plan).empty()) << "on the CPU";
  tessera_candidate none;
  for (const int index : {4, -1}) {
    EXPECT_EQ(std::string(tessera_plan_candidate(&plan, index, &none).message),
              "index: " + std::to_string(index) + ", the plan has 4 candidates, counted from 0");
  }
}

TEST(Plan, Float64GoesToTheReference) {
  const Plan plan = tessera::plan(dense_problem(float64), cpu());
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_REFERENCE);
  EXPECT_FALSE(candidate(plan, "tiled").accepted);
  EXPECT_FALSE(candidate(plan, "decode").accepted);
}

TEST(Plan, TheDeviceForcesAKernel) {
  const Plan plan = tessera::plan(dense_problem(), reference_device());
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_REFERENCE);
  EXPECT_STREQ(candidate(plan, "tiled").reason, "the device asks for reference");
}

TEST(Plan, NobodyTakesItListsEveryRefusal) {
  Device device = cpu();
  device.kernel = TESSERA_KERNEL_TILED;
  Plan plan;
  const Status status = try_plan(dense_problem(float64), device, plan);
  EXPECT_EQ(status.code(), Code::unsupported);
  for (const char* part : {"decode: the device asks for tiled", "tiled: ", "reference: the device asks for tiled"}) {
    EXPECT_NE(status.message().find(part), std::string_view::npos) << status.message();
  }
  EXPECT_THROW(tessera::plan(dense_problem(float64), device), Error);
}

TEST(Plan, RefusesNull) {
  const Problem problem;
  const Device device = cpu();
  Plan plan;
  EXPECT_TRUE(std::string(tessera_make_plan(nullptr, &device, &plan).message).starts_with("problem: NULL"));
  EXPECT_TRUE(std::string(tessera_make_plan(&problem, &device, nullptr).message).starts_with("plan: NULL"));
  EXPECT_TRUE(std::string(tessera_device_cpu(nullptr).message).starts_with("device: NULL"));
  EXPECT_EQ(tessera_workspace_bytes(nullptr), 0u);
}

// The closed form against counting, over every small shape and mask.
TEST(PlanCosts, CountsTheVisibleArea) {
  const Device device = reference_device();
  for (int sq = 0; sq <= 6; ++sq) {
    for (int sk = 0; sk <= 6; ++sk) {
      for (int left = -1; left <= 7; ++left) {
        for (int right = -1; right <= 7; ++right) {
          for (int mode = 0; mode < 4; ++mode) {
            Problem p;
            p.q = layout(float32, {1, sq, 1, 3});
            p.k = layout(float32, {1, sk, 1, 3});
            p.v = layout(float32, {1, sk, 1, 2});
            p.o = layout(float32, {1, sq, 1, 2});
            p.set_window(left, right);
            p.causal = mode & 1;
            p.alignment = mode & 2 ? TESSERA_TOP_LEFT : TESSERA_BOTTOM_RIGHT;
            int visible = 0;
            for (int i = 0; i < sq; ++i) {
              for (int j = 0; j < sk; ++j) {
                const int distance = j - i - (mode & 2 ? 0 : sk - sq);
                visible +=
                    !(p.causal && distance > 0) && (left < 0 || -distance <= left) && (right < 0 || distance <= right);
              }
            }
            ASSERT_EQ(tessera::plan(p, device).flops, 2.0 * visible * (3 + 2))
                << sq << " x " << sk << " left " << left << " right " << right << " mode " << mode;
            ASSERT_EQ(tessera::plan(gradient_of(p), device).flops, 2.0 * visible * (3 * 3 + 2 * 2));
          }
        }
      }
    }
  }
}

TEST(PlanCosts, BytesAgainstStandardAttention) {
  Problem p;
  constexpr double kB = 2, kS = 64, kH = 4, kD = 16, kElement = 2;
  p.q = p.k = p.v = p.o = layout(bfloat16, {2, 64, 4, 16});
  const Plan plan = tessera::plan(p, reference_device());
  EXPECT_EQ(plan.flops, 4 * kB * kH * kS * kS * kD);
  EXPECT_EQ(plan.bytes_moved, 4 * kB * kS * kH * kD * kElement);
  EXPECT_EQ(plan.standard_extra_bytes, kB * kH * kS * kS * kElement);
  EXPECT_EQ(plan.standard_bytes, plan.bytes_moved + 4 * plan.standard_extra_bytes);
  const Plan backward = tessera::plan(gradient_of(p), reference_device());
  EXPECT_EQ(backward.flops, 2.5 * plan.flops);
  EXPECT_EQ(backward.standard_extra_bytes, 2 * plan.standard_extra_bytes);
}

TEST(PlanCosts, BytesOfPagesAreThoseThatSequencesNeed) {
  Problem p;
  p.q = p.o = layout(bfloat16, {2, 1, 4, 16});
  p.k = p.v = layout(bfloat16, {1000, 32, 4, 16});
  p.page_table = layout(int32, {2, 100});
  p.seqused_k = layout(int32, {2});
  constexpr double kPage = 32 * 4 * 16 * 2, kRest = 2 * 2 * 4 * 16 * 2 + 2 * 100 * 4 + 2 * 4;
  EXPECT_EQ(tessera::plan(p).bytes_moved, 2 * 2 * 100 * kPage + kRest);
  p.max_seqlen_k = 33;
  const Plan plan = tessera::plan(p);
  EXPECT_EQ(plan.bytes_moved, 2 * 2 * 2 * kPage + kRest);
  EXPECT_EQ(plan.lengths_are_data, 1);
  EXPECT_NE(describe(plan).find("traffic    at most "), std::string::npos) << describe(plan);
  EXPECT_NE(describe(plan).find("work       at most "), std::string::npos) << describe(plan);
  p.k = p.v = layout(bfloat16, {3, 32, 4, 16});
  EXPECT_EQ(tessera::plan(p).bytes_moved, 2 * 3 * kPage + kRest) << "sequences share pages";
  p.k = p.v = layout(bfloat16, {0, 32, 4, 16});
  EXPECT_EQ(tessera::plan(p).bytes_moved, kRest) << "no page";
  EXPECT_EQ(describe(tessera::plan(dense_problem())).find("traffic    at most"), std::string::npos);
}

// float64 and every dtype with a fast kernel: memory grows with S, never with S x S.
TEST(PlanCosts, WorkspaceIsLinear) {
  for (const DType dtype : {float32, float16, bfloat16, float64}) {
    for (const bool backward : {false, true}) {
      const auto bytes = [&](std::int64_t length) {
        Problem p;
        p.q = p.k = p.v = p.o = layout(dtype, {1, length, 2, 64});
        return static_cast<double>(tessera::plan(backward ? gradient_of(p) : p, cpu()).workspace_bytes);
      };
      EXPECT_LE(bytes(65536), 4.1 * bytes(16384)) << name(dtype) << " backward " << backward;
    }
  }
}

TEST(PlanCosts, AbsurdWorkspaceIsRefusedNotWrapped) {
  Problem p;
  const std::int64_t length = std::numeric_limits<std::int32_t>::max();
  p.q = p.o = layout(float64, {1, 1, 1, 512});
  p.k = p.v = layout(float64, {1, length, 1, 512});
  const Plan plan = tessera::plan(p, reference_device());
  EXPECT_GT(plan.workspace_bytes, length * 512 * 8 * 2);
}

}  // namespace
}  // namespace tessera::test
