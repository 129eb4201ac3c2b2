// What the operating system says about this machine's CPU and memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::cli {

struct Cache {
  std::string name;  // "L1d", "L2"
  std::int64_t size_bytes = 0;
  int shared_by = 1;  // cores
};

std::vector<Cache> caches();
std::vector<std::string> cpu_features();  // features that a kernel can use
std::int64_t memory_bytes();
// A sentence if other processes leave fewer than `threads` processors idle, otherwise "". Measures for a fifth of a
// second.
std::string busy_text(int threads);

// Peak resident memory since the last reset, 0 if unknown.
void reset_peak_resident();
std::int64_t peak_resident_bytes();
std::int64_t resident_bytes();

}  // namespace tessera::cli
