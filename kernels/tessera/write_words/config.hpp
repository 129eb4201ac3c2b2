// write_words/kernel.cuh: writes integers of the host. The config is fixed when the kernel is compiled, the params are
// read at run time; the host fills in both.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

// See write_words/kernel.cuh.
struct WriteWordsConfig {
  int most;  // words of a launch
};
TESSERA_CONFIG_FIELDS(WriteWordsConfig, most)

inline constexpr int kWriteWordsThreads = 256;
inline constexpr int kWriteWordsMost = 720;

struct WriteWordsParams {
  int* to;
  int count;
  int words[kWriteWordsMost];
};

}  // namespace tessera
