#include "device_test.hpp"

namespace tessera::testing {

static const DeviceTests kTests({
    // Of odd threads 8 bytes are read, and the rest is zero.
    {.name = "cp_async_cg_16",
     .header = "tessera/ptx/async_copy.cuh",
     .in = numbered(128),
     .expected = words(128, [](int i) { return i / 4 % 2 && i % 4 >= 2 ? 0u : static_cast<uint32_t>(i); }),
     .body = R"(
  alignas(16) __shared__ uint32 s[128];
  ptx::cp_async_cg_16(shared_address(s + t * 4), in + t * 4, t % 2 ? 8 : 16);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  for (int i = 0; i < 4; ++i) out[t * 4 + i] = s[t * 4 + i];)"},
    {.name = "cp_async_cg_16_l2_128b",
     .header = "tessera/ptx/async_copy.cuh",
     .in = numbered(128),
     .expected = words(128, [](int i) { return i / 4 % 2 && i % 4 >= 2 ? 0u : static_cast<uint32_t>(i); }),
     .body = R"(
  alignas(16) __shared__ uint32 s[128];
  ptx::cp_async_cg_16_l2_128b(shared_address(s + t * 4), in + t * 4, t % 2 ? 8 : 16);
  ptx::cp_async_wait_all();
  for (int i = 0; i < 4; ++i) out[t * 4 + i] = s[t * 4 + i];)"},
    {.name = "cp_async_cg_16_l2_128b_all",
     .header = "tessera/ptx/async_copy.cuh",
     .in = numbered(128),
     .expected = numbered(128),
     .body = R"(
  alignas(16) __shared__ uint32 s[128];
  ptx::cp_async_cg_16_l2_128b(shared_address(s + t * 4), in + t * 4);
  ptx::cp_async_wait_all();
  for (int i = 0; i < 4; ++i) out[t * 4 + i] = s[t * 4 + i];)"},
    {.name = "cp_async_ca_4",
     .header = "tessera/ptx/async_copy.cuh",
     .in = numbered(32),
     .expected = words(32, [](int i) { return static_cast<uint32_t>(31 - i); }),
     .body = R"(
  __shared__ uint32 s[32];
  ptx::cp_async_ca_4(shared_address(s + t), in + 31 - t);
  ptx::cp_async_wait_all();
  out[t] = s[t];)"},
    // Waits for the older of two groups; then for all copies, including those that belong to no group.
    {.name = "cp_async_wait",
     .header = "tessera/ptx/async_copy.cuh",
     .in = numbered(384),
     .expected = numbered(384),
     .body = R"(
  alignas(16) __shared__ uint32 s[384];
  const auto load = [&](int part) {
    ptx::cp_async_cg_16(shared_address(s + part * 128 + t * 4), in + part * 128 + t * 4, 16);
  };
  load(0);
  ptx::cp_async_commit_group();
  load(1);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<1>();
  for (int i = 0; i < 4; ++i) out[t * 4 + i] = s[t * 4 + i];
  load(2);
  ptx::cp_async_wait_all();
  for (int part = 1; part < 3; ++part)
    for (int i = 0; i < 4; ++i) out[part * 128 + t * 4 + i] = s[part * 128 + t * 4 + i];)"},
});

}  // namespace tessera::testing
