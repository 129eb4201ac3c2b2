// Copies land at once, or as late as their thread waits for them; until then there is NaN.
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

inline void emulated_land(const emulated::Block::Thread::ElementCopy& copy) {
  char bytes[16] = {};
  if (copy.bytes > 0) std::memcpy(bytes, copy.from, static_cast<size_t>(copy.bytes));
  std::memcpy(emulated::here().own_shared(copy.to, sizeof bytes, 16), bytes, sizeof bytes);
}
// Groups before `end`.
inline void emulated_land_groups(unsigned end) {
  auto& copies = emulated::here().thread().element_copies;
  size_t landed = 0;
  while (landed < copies.size() && copies[landed].group < end) emulated_land(copies[landed++]);
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(landed));
}

inline void cp_async_cg_16(uint32 shared, const void* global, int source_bytes) {
  emulated::Block& block = emulated::here();
  if (source_bytes < 0 || source_bytes > 16) block.fail("cp.async of %d bytes", source_bytes);
  if (source_bytes > 0 && reinterpret_cast<uintptr_t>(global) % 16 != 0) block.fail("cp.async from %p", global);
  emulated::Block::Thread& thread = block.thread();
  const emulated::Block::Thread::ElementCopy copy{shared, global, source_bytes, thread.element_groups};
  if (!block.element_copies_late()) return emulated_land(copy);
  std::memset(block.own_shared(shared, 16, 16), 0xff, 16);
  thread.element_copies.push_back(copy);
}
inline void cp_async_cg_16_l2_128b(uint32 shared, const void* global, int source_bytes) {
  cp_async_cg_16(shared, global, source_bytes);
}
inline void cp_async_cg_16_l2_128b(uint32 shared, const void* global) { cp_async_cg_16(shared, global, 16); }
inline void cp_async_commit_group() { ++emulated::here().thread().element_groups; }
template <int kPending>
void cp_async_wait_group() {
  const unsigned groups = emulated::here().thread().element_groups;
  if (groups >= kPending) emulated_land_groups(groups - kPending);
}
inline void cp_async_wait_all() { emulated_land_groups(emulated::here().thread().element_groups + 1); }

}  // namespace tessera::ptx
