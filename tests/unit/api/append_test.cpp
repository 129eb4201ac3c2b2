// tessera_append against its definition: the place of each element, unchanged elements, and refusals before anything is
// written.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "append_step.hpp"

namespace tessera::test {
namespace {

auto on_threads(int threads) {
  return [threads](const tessera_append_call& call) {
    Device device = cpu();
    device.threads = threads;
    append(call, &device);
  };
}

TEST(Append, PutsEveryTokenWhereItBelongs) {
  for (std::uint64_t n = 0; n < 400; ++n) {
    SCOPED_TRACE("form " + std::to_string(n));
    expect_right(draw_form(n), on_threads(n % 4 == 0 ? 3 : 1));
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(Append, ManyTokensOnManyThreads) {
  expect_right({.dtype = bfloat16,
                .packed = true,
                .paged = true,
                .positions = true,
                .batch = 7,
                .tokens = 90,
                .heads_q = 8,
                .heads_kv = 4,
                .d = 128,
                .dv = 128,
                .rotary = 64,
                .page_size = 16,
                .max_pages = 9,
                .seed = 5},
               on_threads(4));
}

// Whatever is wrong with one token, no other one is written.
void expect_refused(const char* message, const Form& form, const std::function<void(Step&)>& spoil) {
  Step step(form);
  spoil(step);
  const auto before = step.memory;
  const Status status = try_append(step.call);
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_TRUE(status.message().starts_with(message)) << status.message();
  for (const auto& [name, bytes] : before) EXPECT_EQ(step.bytes(name), bytes) << name << " was written to";
}

TEST(Append, RefusesBeforeAnythingIsWritten) {
  const Form dense{.seed = 3}, paged{.paged = true, .seed = 3}, packed{.packed = true, .positions = true, .seed = 3};
  expect_refused("seqused_k[2]: 31, accepted 4 .. 30", dense, [](Step& s) { s.seqused_k[2] = 31; });
  expect_refused("seqused_k[1]: 3, accepted 4 .. 30", dense, [](Step& s) { s.seqused_k[1] = 3; });
  expect_refused("page_table[2, ", paged, [](Step& s) {
    s.page_table[2 * s.form.max_pages + (s.seqused_k[2] - 1) / s.form.page_size] = static_cast<std::int32_t>(s.pages);
  });
  expect_refused("positions_k: token ", packed,
                 [](Step& s) { s.positions_k[s.cu_seqlens.back() - 1] = Step::kAngles; });
  expect_refused("positions_q: token ", packed, [](Step& s) { s.positions_q[s.cu_seqlens.back() - 1] = -1; });
  expect_refused("seqused_k: token ", dense,
                 [](Step& s) { s.call.cos.layout.shape[0] = s.call.sin.layout.shape[0] = 2; });
  expect_refused("cu_seqlens[1]: ", packed, [](Step& s) { s.cu_seqlens[1] = 1000; });
  expect_refused("k_cache: shares memory with k", dense, [](Step& s) { s.call.k_cache.data = s.call.k.data; });
  expect_refused("v: shape ", dense, [](Step& s) { ++s.call.v.layout.shape[2]; });
  expect_refused("v_cache: shape ", paged, [](Step& s) { ++s.call.v_cache.layout.shape[1]; });
  expect_refused("sin: absent", dense, [](Step& s) { s.call.sin = {}; });
  expect_refused("cos: shape [64, 17] turns 34 columns, accepted 2 .. 32", dense,
                 [](Step& s) { s.call.cos.layout.shape[1] = s.call.sin.layout.shape[1] = 17; });
  expect_refused("q: given without cos and sin", dense, [](Step& s) { s.call.cos = s.call.sin = {}; });
  expect_refused("interleaved: 2", dense, [](Step& s) { s.call.interleaved = 2; });
  expect_refused("k: NULL", dense, [](Step& s) { s.call.k.data = nullptr; });
  expect_refused("call: struct_size 0", dense, [](Step& s) { s.call.struct_size = 0; });
}

// A forward call with the same lengths sees the appended tokens.
TEST(Append, ThenAttentionSeesTheNewKeys) {
  Form form{.dtype = float32,
            .packed = true,
            .paged = true,
            .batch = 2,
            .tokens = 3,
            .heads_q = 2,
            .heads_kv = 2,
            .d = 8,
            .dv = 8,
            .rotary = 0,
            .page_size = 4,
            .max_pages = 3,
            .seed = 9};
  Step step(form);
  append(step.call);
  Problem problem;
  const std::int64_t tokens = step.call.k.layout.shape[0];
  problem.q = problem.o = layout(float32, {tokens, 2, 8});
  problem.k = step.call.k_cache.layout, problem.v = step.call.v_cache.layout;
  problem.cu_seqlens_q = layout(int32, {3});
  problem.page_table = layout(int32, {2, 3}), problem.seqused_k = layout(int32, {2});
  problem.causal = true, problem.window_left = 0;  // a query sees its own key alone, and gives its value
  for (std::int32_t& page : step.page_table) page = std::max(page, 0);
  const Plan plan = tessera::plan(problem);
  std::vector<std::byte> workspace(plan.workspace_bytes);
  std::vector<float> q(static_cast<std::size_t>(tokens * 16), 1.0f), o(q.size());
  Buffers b = {.q = q.data(), .k = step.call.k_cache.data, .v = step.call.v_cache.data, .o = o.data()};
  b.cu_seqlens_q = step.cu_seqlens.data(), b.seqused_k = step.seqused_k.data(), b.page_table = step.page_table.data();
  forward(plan, b, workspace);
  const auto* v = reinterpret_cast<const float*>(step.memory.at("v").data());
  for (std::int64_t n = step.cu_seqlens.front() * 16; n < step.cu_seqlens.back() * 16; ++n) EXPECT_EQ(o[n], v[n]) << n;
}

}  // namespace
}  // namespace tessera::test
