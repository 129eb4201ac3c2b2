// One attention problem on random data, for repeated calls.
#pragma once

#include <cstdint>
#include <vector>

#include "random.hpp"
#include "tessera/tessera.hpp"

namespace bench {

struct Shape {
  tessera_direction direction = TESSERA_FORWARD;
  int32_t dtype = TESSERA_FLOAT32;
  int64_t batch = 1, seqlen_q = 0, seqlen_k = 0, heads_q = 1, heads_kv = 1, head_dim = 64;
  std::vector<int64_t> packed;  // lengths of packed sequences, both of queries and keys; empty: dense
  bool heads_first = false;     // dense tensors are [B, H, S, D] in memory
  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  bool bias = false;  // [1, Hq, Sq, Sk], q's dtype
  bool alibi = false;
  bool sink = false;
  double softcap = 0;
  double dropout_p = 0;
};

// Visible pairs (query, key) over all sequences, for one head.
double visible_pairs(const Shape& shape);

// FLOPs of the products on the visible area: 4 D a pair forward, 10 D backward.
double attention_flops(const Shape& shape);

// Bytes of keys and values, each read once.
double kv_bytes(const Shape& shape);

// Owns inputs, outputs, plan and workspace. Throws tessera::Error if the library refuses.
class Attention {
 public:
  Attention(const Shape& shape, const tessera_device& device, uint64_t seed);

  void run() const { run(workspace_); }
  void run(const Buffer& workspace) const;
  const tessera::Plan& plan() const { return plan_; }
  const tessera::Buffers& buffers() const { return buffers_; }

 private:
  void become_backward(const tessera::Problem& forward, const tessera_device& device, uint64_t seed);
  void allocate_rest(const tessera::Problem& problem, uint64_t seed);
  void* random(const tessera::Layout& layout, uint64_t seed);
  void* uninitialised(const tessera::Layout& layout);
  const int32_t* cumulative(const std::vector<int64_t>& lengths);

  tessera::Plan plan_;
  tessera::Buffers buffers_;
  std::vector<Buffer> owned_;
  Buffer workspace_;
};

}  // namespace bench
