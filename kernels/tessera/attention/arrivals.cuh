// Arrivals of blocks at a counter in the workspace: the last one to arrive merges what all of them have stored.
//
// No launch initialises the counter: the count is valid only if the upper bits hold the counter's tag, a hash of its
// address. Uninitialised workspace has the right tag with a probability of 2^-48. The first arrival that finds no tag
// writes it; the last arrival leaves the tag with a count of 0 for the next launch.
#pragma once

#include "tessera/ptx/synchronization.cuh"

namespace tessera {

inline constexpr int kArrivalTagShift = 16;

TESSERA_DEVICE unsigned long long arrival_tag(const unsigned long long* counter) {
  unsigned long long x = reinterpret_cast<unsigned long long>(counter) + 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return (x ^ x >> 31) >> kArrivalTagShift << kArrivalTagShift;
}

// Called by one thread, after a barrier of its block. Returns whether this is the last of `parts` arrivals; if so, the
// writes of the blocks that arrived before it are visible.
TESSERA_DEVICE bool arrive_as_last(unsigned long long* counter, int parts) {
  const unsigned long long tag = arrival_tag(counter), count_mask = (1ull << kArrivalTagShift) - 1;
  unsigned long long old = ptx::atom_acq_rel_add_u64(counter, 1);
  if ((old & ~count_mask) != tag) [[unlikely]] {
    // An addition to a counter without a tag is not counted. Arrivals after the tag is written are counted as usual.
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
  if (last) *counter = tag;  // no other block of this launch accesses the counter any more
  return last;
}

}  // namespace tessera
