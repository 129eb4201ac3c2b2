#include "device_test.hpp"

namespace tessera::testing {
namespace {

const std::string kBarrier = R"(
  alignas(1024) __shared__ uint32 s[256];
  alignas(8) __shared__ unsigned long long barrier;
  const uint32 full = shared_address(&barrier), to = shared_address(s);
  if (t == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();)";
const std::string kOneStore = R"(
  ptx::fence_proxy_async();
  __syncwarp();
  if (t == 0) {
    ptx::%;
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read();
  })";
std::string store_by(const std::string& call) {
  std::string body = kOneStore;
  return body.replace(body.find('%'), 1, call);
}

const DeviceTests kTests({
    {.name = "cp_async_bulk_load",
     .header = "tessera/ptx/async_copy.cuh",
     .archs = Archs::kHopperOn,
     .in = numbered(256),
     .expected = numbered(256),
     .body = kBarrier + R"(
  if (t == 0) {
    ptx::mbarrier_arrive_expect_tx(full, 1024);
    ptx::cp_async_bulk_load(to, in, 1024, full);
  }
  ptx::mbarrier_wait_parity(full, 0);
  for (int i = t; i < 256; i += 32) out[i] = s[i];)"},
    {.name = "cp_async_bulk_store",
     .header = "tessera/ptx/async_copy.cuh",
     .archs = Archs::kHopperOn,
     .expected = numbered(128),
     .body = "alignas(16) __shared__ uint32 s[128];\nfor (int i = t; i < 128; i += 32) s[i] = i;" +
             store_by("cp_async_bulk_store(reinterpret_cast<float*>(out), shared_address(s), 512)")},
    // The thread that waited reads what the copy wrote.
    {.name = "cp_async_bulk_wait_group",
     .header = "tessera/ptx/async_copy.cuh",
     .archs = Archs::kHopperOn,
     .expected = words(256, [](int i) { return static_cast<uint32_t>(i % 128); }),
     .body = R"(
  alignas(16) __shared__ uint32 s[128];
  for (int i = t; i < 128; i += 32) s[i] = i;
  ptx::fence_proxy_async();
  __syncwarp();
  if (t == 0) {
    ptx::cp_async_bulk_store(reinterpret_cast<float*>(out), shared_address(s), 512);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group();
    for (int i = 0; i < 128; ++i) out[128 + i] = static_cast<const volatile uint32*>(out)[i];
  })"},
    // Ordinary stores of this thread, to which a copy then adds, and reads of the copy's results.
    {.name = "fence_proxy_async_global",
     .header = "tessera/ptx/async_copy.cuh",
     .archs = Archs::kHopperOn,
     .expected = words(256, [](int i) { return word(static_cast<float>(i % 128) + 2); }),
     .body = R"(
  alignas(16) __shared__ float s[128];
  for (int i = t; i < 128; i += 32) s[i] = i;
  ptx::fence_proxy_async();
  __syncwarp();
  if (t == 0) {
    for (int i = 0; i < 128; ++i) reinterpret_cast<float*>(out)[i] = 2;
    ptx::fence_proxy_async_global();
    ptx::cp_reduce_async_bulk_add_f32(reinterpret_cast<float*>(out), shared_address(s), 512);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group();
    ptx::fence_proxy_async_global();
    for (int i = 0; i < 128; ++i) out[128 + i] = static_cast<const volatile uint32*>(out)[i];
  })"},
    {.name = "cp_reduce_async_bulk_add_f32",
     .header = "tessera/ptx/async_copy.cuh",
     .archs = Archs::kHopperOn,
     .expected = words(128, [](int i) { return word(static_cast<float>(i) + 1); }),
     .fill = word(1.0f),
     .body = "alignas(16) __shared__ float s[128];\nfor (int i = t; i < 128; i += 32) s[i] = i;" +
             store_by("cp_reduce_async_bulk_add_f32(reinterpret_cast<float*>(out), shared_address(s), 512)")},
    // Rows 12 ... 19 of 16: those past the last are zero. The swizzle is SwizzledTile's.
    {.name = "cp_async_bulk_tensor_4d",
     .header = "tessera/ptx/async_copy.cuh",
     .archs = Archs::kHopperOn,
     .in = numbered(16 * 32),
     .expected = words(256, [](int i) { return i < 128 ? static_cast<uint32_t>(12 * 32 + i) : 0u; }),
     .map = {.rows = 16},
     .body = kBarrier + R"(
  if (t == 0) {
    ptx::prefetch_tensormap(&map);
    ptx::mbarrier_arrive_expect_tx(full, 1024);
    ptx::cp_async_bulk_tensor_4d(to, &map, full, 0, 12, 0, 0);
  }
  ptx::mbarrier_wait_parity(full, 0);
  for (int i = t; i < 256; i += 32) out[i] = *swizzled_word<SwizzledTile<8, 64>>(s, i / 32, i % 32);)"},
    // Block 0 brings the box to both blocks of the cluster.
    {.name = "cp_async_bulk_tensor_4d_multicast",
     .header = "tessera/ptx/async_copy.cuh",
     .archs = Archs::kHopperOn,
     .blocks = 2,
     .in = numbered(16 * 32),
     .expected = words(512, [](int i) { return static_cast<uint32_t>(8 * 32 + i % 256); }),
     .map = {.rows = 16},
     .body = kBarrier + R"(
  if (t == 0) ptx::mbarrier_arrive_expect_tx(full, 1024);
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  if (t == 0 && ptx::cluster_ctarank() == 0) ptx::cp_async_bulk_tensor_4d_multicast(to, &map, full, 0, 8, 0, 0, 3);
  ptx::mbarrier_wait_parity(full, 0);
  for (int i = t; i < 256; i += 32) {
    out[blockIdx.x * 256 + i] = *swizzled_word<SwizzledTile<8, 64>>(s, i / 32, i % 32);
  }
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();)"},
    // A box of eight rows to a tensor of six: two are not written.
    {.name = "cp_async_bulk_tensor_store_4d",
     .header = "tessera/ptx/async_copy.cuh",
     .archs = Archs::kHopperOn,
     .expected = numbered(6 * 32),
     .map = {.of_output = true, .rows = 6},
     .body = R"(
  alignas(1024) __shared__ uint32 s[256];
  for (int i = t; i < 256; i += 32) *swizzled_word<SwizzledTile<8, 64>>(s, i / 32, i % 32) = i;)" +
             store_by("cp_async_bulk_tensor_store_4d(&map, shared_address(s), 0, 0, 0, 0)")},
});

}  // namespace
}  // namespace tessera::testing
