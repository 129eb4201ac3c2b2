// Standard attention on the inputs of an Attention.
#pragma once

#include "attention.hpp"
#include "peers/standard_attention.hpp"

namespace bench {

class StandardPeer {
 public:
  // Backward needs the P that forward stores, so that is run here, outside what run() takes.
  StandardPeer(const Shape& shape, const Attention& attention, int threads);

  void run();

 private:
  tessera_direction direction_;
  tessera::Buffers buffers_;
  Buffer o_;  // the attention's own is read by its backward pass, and stays as it is
  tessera::peers::StandardAttention standard_;
};

}  // namespace bench
