// Counts the parts of a work tile that are done, so that the last one merges them. No launch prepares the counter: its count is valid
// beside its tag, a hash of its address, alone. What a workspace holds at first has no tag, but by a chance of 2^-48, and the
// first arrival that finds none sets it; the last arrival leaves 0 beside the tag for the next launch.
#pragma once

#include "tessera/ptx/atomic.cuh"

namespace tessera {

inline constexpr int kArrivalTagShift = 16;

TESSERA_DEVICE unsigned long long arrival_tag(const unsigned long long* counter) {
  unsigned long long x = reinterpret_cast<unsigned long long>(counter) + 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return (x ^ x >> 31) >> kArrivalTagShift << kArrivalTagShift;
}

// By one thread, after a barrier of its block. The answer is whether it is the last of `parts` to arrive; what the blocks that
// arrived before it wrote is then visible to it.
TESSERA_DEVICE bool arrive_as_last(unsigned long long* counter, int parts) {
  const unsigned long long tag = arrival_tag(counter), count_mask = (1ull << kArrivalTagShift) - 1;
  unsigned long long old = ptx::atom_acq_rel_add_u64(counter, 1);
  if ((old & ~count_mask) != tag) [[unlikely]] {
    // An addition to what has no tag counts for nothing. Arrivals that come after the tag is there count as usual.
    for (unsigned long long seen = old + 1;;) {
      if ((seen & ~count_mask) == tag) {
        old = ptx::atom_acq_rel_add_u64(counter, 1);
        break;
      }
      const unsigned long long found = ptx::atom_acq_rel_cas_u64(counter, seen, tag | 1);
      if (found == seen) {
        old = tag;
        break;
      }
      seen = found;
    }
  }
  const bool last = (old & count_mask) == static_cast<unsigned long long>(parts - 1);
  if (last) *counter = tag;  // no other block of this launch touches it any more
  return last;
}

}  // namespace tessera
