// Standard attention on the inputs of an Attention.
#pragma once

#include "attention.hpp"
#include "peers/standard_attention.hpp"

namespace bench {

class StandardPeer {
 public:
  // Backward needs the P that forward stores, so forward runs here, outside run().
  StandardPeer(const Shape& shape, const Attention& attention, int threads);

  void run();

 private:
  tessera_direction direction_;
  tessera::Buffers buffers_;
  Buffer o_;  // the attention's own o is an input of its backward pass, and must not change
  tessera::peers::StandardAttention standard_;
};

}  // namespace bench
