#include "standard.hpp"

namespace bench {
namespace {

using tessera::peers::AttentionShape;

AttentionShape peer_shape(const Shape& shape) {
  return {.batch = shape.batch,
          .seqlen_q = shape.seqlen_q,
          .seqlen_k = shape.seqlen_k,
          .heads_q = shape.heads_q,
          .heads_kv = shape.heads_kv,
          .head_dim = shape.head_dim,
          .head_dim_v = shape.head_dim,
          .causal = shape.causal};
}

}  // namespace

StandardPeer::StandardPeer(const Shape& shape, const Attention& attention, int threads)
    : direction_(shape.direction),
      buffers_(attention.buffers()),
      o_(static_cast<size_t>(peer_shape(shape).o_elems()) * tessera_dtype_bytes(shape.dtype)),
      standard_(peer_shape(shape), static_cast<tessera_dtype>(shape.dtype), shape.direction, threads) {
  if (direction_ == TESSERA_BACKWARD) standard_.forward(buffers_.q, buffers_.k, buffers_.v, o_.data());
}

void StandardPeer::run() {
  if (direction_ == TESSERA_FORWARD) {
    standard_.forward(buffers_.q, buffers_.k, buffers_.v, o_.data());
  } else {
    standard_.backward(buffers_.q, buffers_.k, buffers_.v, buffers_.d_o, buffers_.d_q, buffers_.d_k, buffers_.d_v);
  }
}

}  // namespace bench
