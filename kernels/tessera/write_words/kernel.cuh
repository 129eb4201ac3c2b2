// Writes integers that the host has when it launches: a launch carries its own copy of them. A copy from the host's
// memory would wait for the stream, and a captured graph would read that memory again at each replay. The ranks of a
// packed batch write the lengths of its sequences with it.
//
// Grid: one block. Shared memory: none.
#pragma once

#include "tessera/ptx/device.cuh"
#include "tessera/write_words/config.hpp"

namespace tessera {

template <WriteWordsConfig kCfg>
TESSERA_DEVICE void write_words(const WriteWordsParams& p) {
  static_assert(kCfg.most == kWriteWordsMost);
  for (int n = static_cast<int>(threadIdx.x); n < p.count; n += kWriteWordsThreads) p.to[n] = p.words[n];
}

}  // namespace tessera
