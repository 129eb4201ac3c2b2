// tessera_append on the CPU: the threads divide the tokens, and the instruction set's kernel rotates a token.
#include "core/append.hpp"

#include <algorithm>
#include <cstring>

#include "core/dtypes.hpp"
#include "cpu/cpu.hpp"
#include "cpu/runner.hpp"
#include "cpu/tables.hpp"

namespace tessera::cpu {
namespace {

constexpr int64_t kTokensPerItem = 16;
// With fewer bytes a second thread costs more than it gains.
constexpr int64_t kMinParallelBytes = 256 << 10;

// [B, S, H, D] or packed [T, H, D]; strides in bytes.
struct Rows {
  char* data;
  core::RowStrides stride;

  Rows(const tessera_tensor& tensor) : data(static_cast<char*>(tensor.data)) {  // NOLINT: is the tensor
    if (!core::present(tensor)) return;
    const auto bytes = static_cast<int64_t>(tessera_dtype_bytes(tensor.layout.dtype));
    stride = core::row_strides(tensor.layout);
    stride.batch *= bytes, stride.row *= bytes, stride.head *= bytes;
  }
  char* at(int64_t b, int64_t row) const { return data + stride.batch * b + stride.row * row; }
};

class Append {
 public:
  Append(const tessera_append_call& call, const KernelTable& table)
      : call_(call),
        table_(table),
        size_(core::sizes(call)),
        k_(call.k),
        v_(call.v),
        k_cache_(call.k_cache),
        v_cache_(call.v_cache),
        q_(call.q),
        q_out_(core::present(call.q_out) ? call.q_out : call.q) {
    rotary_.dtype = call.k.layout.dtype;
    rotary_.elem_bytes = static_cast<int32_t>(tessera_dtype_bytes(rotary_.dtype));
    rotary_.head_dim = size_.head_dim, rotary_.rotary_dim = size_.rotary_dim;
    rotary_.interleaved = call.interleaved;
    plain_ = rotary_, plain_.rotary_dim = 0;
    of_k_ = {call.k_cache.layout.dtype, call.compute_scales, size_.head_dim};
    of_v_ = {call.v_cache.layout.dtype, call.compute_scales, size_.head_dim_v};
    if (size_.rotary_dim == 0) return;
    rotary_.angle_dtype = call.cos.layout.dtype;
    const auto bytes = static_cast<int64_t>(tessera_dtype_bytes(rotary_.angle_dtype));
    rotary_.cos = static_cast<const char*>(call.cos.data), rotary_.cos_row = call.cos.layout.strides[0] * bytes;
    rotary_.sin = static_cast<const char*>(call.sin.data), rotary_.sin_row = call.sin.layout.strides[0] * bytes;
  }

  // Items of a sequence, its keys first.
  int64_t items(int64_t b) const {
    const core::AppendedTokens tokens = core::tokens_of(call_, size_, b);
    return chunks(tokens.count) + chunks(tokens.count_q);
  }

  void run_item(int64_t b, int64_t item) const {
    const core::AppendedTokens tokens = core::tokens_of(call_, size_, b);
    const int64_t of_keys = chunks(tokens.count);
    const bool keys = item < of_keys;
    const int64_t begin = (keys ? item : item - of_keys) * kTokensPerItem;
    const int64_t end = std::min(keys ? tokens.count : tokens.count_q, begin + kTokensPerItem);
    for (int64_t i = begin; i < end; ++i) keys ? write_key(tokens, b, i) : turn_query(tokens, b, i);
  }

  int64_t bytes() const {
    const int64_t rows = core::present(call_.cu_seqlens) ? 1 : size_.batch;
    return rows * rotary_.elem_bytes *
           (size_.tokens * size_.heads_kv * (size_.head_dim + size_.head_dim_v) +
            size_.tokens_q * size_.heads_q * size_.head_dim);
  }

 private:
  static int64_t chunks(int64_t tokens) { return (tokens + kTokensPerItem - 1) / kTokensPerItem; }

  void write_key(const core::AppendedTokens& tokens, int64_t b, int64_t i) const {
    const int64_t key = tokens.first + i;
    const bool paged = core::present(call_.page_table);
    const int64_t page = paged ? core::index_at(call_.page_table, b, key / size_.page_size) : b;
    const int64_t slot = key % size_.page_size;
    char* const k = k_cache_.at(page, slot);
    const int64_t position = size_.rotary_dim > 0 ? core::position_of(call_.positions_k, tokens, b, i) : 0;
    if (core::is_8bit(of_k_.dtype)) {
      const auto quantize = [&](const RotaryParams& rotary, const QuantizeParams& params, const Rows& from,
                                const Rows& cache, const tessera_tensor& scales) {
        const ScalesAt at = scales_at(scales, b, page, slot);
        table_.quantize_token(rotary, params, from.at(b, tokens.begin + i), cache.at(page, slot), position,
                              size_.heads_kv, from.stride.head, cache.stride.head, at.data, at.head);
      };
      quantize(rotary_, of_k_, k_, k_cache_, call_.k_descale);
      return quantize(plain_, of_v_, v_, v_cache_, call_.v_descale);
    }
    if (size_.rotary_dim > 0) {
      table_.rotate_token(rotary_, k_.at(b, tokens.begin + i), k, position, size_.heads_kv, k_.stride.head,
                          k_cache_.stride.head);
    } else {
      copy(k_.at(b, tokens.begin + i), k_.stride.head, k, k_cache_.stride.head, size_.head_dim);
    }
    copy(v_.at(b, tokens.begin + i), v_.stride.head, v_cache_.at(page, slot), v_cache_.stride.head, size_.head_dim_v);
  }

  // Those of a token's heads, `head` bytes apart. NULL: 1
  struct ScalesAt {
    char* data;
    int64_t head;
  };
  ScalesAt scales_at(const tessera_tensor& scales, int64_t b, int64_t page, int64_t slot) const {
    if (!core::present(scales)) return {};
    const core::ScaleStrides s = core::scale_strides(scales.layout, true);
    const bool of_token = scales.layout.rank == 3;
    const int64_t at = of_token ? s.batch * page + s.row * slot : s.batch * b;
    return {reinterpret_cast<char*>(static_cast<float*>(scales.data) + at), s.head * int64_t{sizeof(float)}};
  }

  void turn_query(const core::AppendedTokens& tokens, int64_t b, int64_t i) const {
    const int64_t position = core::position_of(call_.positions_q, tokens, b, i);
    table_.rotate_token(rotary_, q_.at(b, tokens.begin + i), q_out_.at(b, tokens.begin + i), position, size_.heads_q,
                        q_.stride.head, q_out_.stride.head);
  }

  // Copies the heads of one token, all at once if they are adjacent.
  void copy(const char* from, int64_t from_head, char* to, int64_t to_head, int64_t head_dim) const {
    const int64_t head_bytes = head_dim * rotary_.elem_bytes;
    if (from_head == head_bytes && to_head == head_bytes) {
      std::memcpy(to, from, static_cast<size_t>(size_.heads_kv * head_bytes));
      return;
    }
    for (int64_t h = 0; h < size_.heads_kv; ++h) {
      std::memcpy(to + h * to_head, from + h * from_head, static_cast<size_t>(head_bytes));
    }
  }

  const tessera_append_call& call_;
  const KernelTable& table_;
  const core::AppendSizes size_;
  const Rows k_, v_, k_cache_, v_cache_, q_, q_out_;
  RotaryParams rotary_{}, plain_{};  // of keys; of values
  QuantizeParams of_k_{}, of_v_{};
};

}  // namespace

void append(const tessera_append_call& call, const tessera_device& device, const tessera_executor& executor,
            core::Cancel& cancel) {
  const Append tokens(call, kernel_table(device.isa));
  const int64_t batch = core::sizes(call).batch;
  int64_t most = 0;
  for (int64_t b = 0; b < batch; ++b) most = std::max(most, tokens.items(b));
  const Runner runner(device.threads, nullptr, 0, executor, cancel, tokens.bytes() < kMinParallelBytes);
  // Sequences have different lengths: items past the end of a shorter one do nothing.
  runner.run(batch * most, [&](int64_t item, char*) {
    const int64_t b = item / most;
    if (item % most < tokens.items(b)) tokens.run_item(b, item % most);
  });
}

}  // namespace tessera::cpu
