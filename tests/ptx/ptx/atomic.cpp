#include "device_test.hpp"

namespace tessera::testing {

static const DeviceTests kTests({
    {.name = "red_add_f32",
     .header = "tessera/ptx/synchronization.cuh",
     .expected = {word(496)},
     .fill = 0,
     .body = "ptx::red_add_f32(reinterpret_cast<float*>(out), static_cast<float>(t));"},
    {.name = "red_add_v4_f32",
     .header = "tessera/ptx/synchronization.cuh",
     .archs = Archs::kHopperOn,
     .expected = {word(32), word(64), word(496), word(-32)},
     .fill = 0,
     .body = R"(
  const float x[4] = {1.0f, 2.0f, static_cast<float>(t), -1.0f};
  ptx::red_add_v4_f32(reinterpret_cast<float*>(out), x);)"},
    {.name = "red_add_u64",
     .header = "tessera/ptx/synchronization.cuh",
     .expected = {0xffffffe0u, 0x1f},
     .fill = 0,
     .body = "ptx::red_add_u64(reinterpret_cast<unsigned long long*>(out), 0xffffffffull);"},
    {.name = "red_or_b32",
     .header = "tessera/ptx/synchronization.cuh",
     .expected = {0xffffffffu},
     .fill = 0,
     .body = "ptx::red_or_b32(out, 1u << t);"},
    // Warp 1 sees what warp 0 wrote before its release.
    {.name = "release_acquire",
     .header = "tessera/ptx/synchronization.cuh",
     .threads = 64,
     .expected = {5, 7, 7},
     .fill = 0,
     .body = R"(
  int* flag = reinterpret_cast<int*>(out);
  if (t == 0) {
    out[1] = 7;
    ptx::red_release_add_s32(flag, 5);
  }
  if (t == 32) {
    while (ptx::ld_acquire_s32(flag) != 5) {
    }
    out[2] = out[1];
  })"},
    // Each of all threads' additions sees another previous count; a comparison returns the previous value.
    {.name = "atom_acq_rel_u64",
     .header = "tessera/ptx/synchronization.cuh",
     .expected = {32, 0, 496, 0, 7, 9, 32, 32},
     .fill = 0,
     .body = R"(
  auto* counter = reinterpret_cast<unsigned long long*>(out);
  ptx::atom_acq_rel_add_u64(counter + 1, ptx::atom_acq_rel_add_u64(counter, 1));
  __syncwarp();
  if (t == 0) {
    const unsigned long long other = (9ull << 32) + 7;
    out[6] = static_cast<uint32>(ptx::atom_acq_rel_cas_u64(counter, 31, 0));
    out[7] = static_cast<uint32>(ptx::atom_acq_rel_cas_u64(counter, 32, 32));
    ptx::atom_acq_rel_cas_u64(counter + 2, 0, other);
  })"},
});

}  // namespace tessera::testing
