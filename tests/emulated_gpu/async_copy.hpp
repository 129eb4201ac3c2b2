// A copy that the hardware makes asynchronously, after the instruction that starts it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor_map.hpp"

namespace tessera::emulated {

struct AsyncCopy {
  enum class Kind {
    kLoadBox,     // global `map` at `at` to shared `to` of each block in `blocks`
    kLoad,        // `bytes` of global to shared
    kSendShared,  // `bytes` of this block's shared `from` to shared `to`
    kSendWords,   // `words` to shared `to`
    kStoreBox,    // shared `from` to global `map` at `at`
    kStore,       // `bytes` of shared `from` to global
    kAddFloats,   // the same, but added
  };
  Kind kind;
  uint32_t to = 0, from = 0, barrier = 0;  // addresses in shared memory
  void* global = nullptr;
  int bytes = 0;
  int at[4] = {};
  unsigned blocks = 0;  // of the cluster, one bit each; 0: `to` selects the block
  uint32_t words[4] = {};
  EmulatedTensorMap map{};
};

}  // namespace tessera::emulated
