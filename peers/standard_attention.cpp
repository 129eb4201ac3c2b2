#include "peers/standard_attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "peers/blas.hpp"
#include "peers/loops.hpp"
#include "peers/team.hpp"

namespace tessera::peers {
namespace {

using Buffer = std::unique_ptr<float[]>;

// Uninitialised.
Buffer allocate(std::int64_t elems) { return Buffer(new float[static_cast<std::size_t>(elems)]); }

bool is_half(tessera_dtype dtype) { return dtype == TESSERA_FLOAT16 || dtype == TESSERA_BFLOAT16; }

// Keys that query i sees in a causal problem: a prefix.
std::int64_t visible_keys(const AttentionShape& shape, std::int64_t i) {
  if (!shape.causal) return shape.seqlen_k;
  return std::clamp<std::int64_t>(i + shape.seqlen_k - shape.seqlen_q + 1, 0, shape.seqlen_k);
}

}  // namespace

double AttentionShape::effective_scale() const {
  return scale != 0 ? scale : 1.0 / std::sqrt(static_cast<double>(head_dim));
}

double AttentionShape::flops(tessera_direction direction) const {
  const double pairs = static_cast<double>(batch) * static_cast<double>(heads_q) * static_cast<double>(seqlen_q) *
                       static_cast<double>(seqlen_k) * (causal ? 0.5 : 1.0);
  return 2.0 * pairs * static_cast<double>(head_dim + head_dim_v) * (direction == TESSERA_BACKWARD ? 2.5 : 1.0);
}

struct StandardAttention::Impl {
  AttentionShape shape;
  tessera_dtype dtype;
  Team team;
  const Loops& loops = best_loops();
  bool heads_in_parallel;  // a head a thread, each with one BLAS thread; else heads in turn, with all BLAS threads

  Buffer p;                               // [B, Hq, Sq, Sk]: S, then P
  Buffer dp;                              // [B, Hq, Sq, Sk]: dP, then dS
  Buffer s;                               // [B, Hq, Sq, Sk]: S before the program, for its gradient
  Buffer q, k, v, o, d_o, d_q, d_k, d_v;  // float32 copies of half precision tensors

  const RowProgram* program;  // nullptr: none

  Impl(const AttentionShape& of, tessera_dtype t, tessera_direction direction, int threads, const RowProgram* rows)
      : shape(of), dtype(t), team(threads), program(rows) {
    const std::int64_t tasks = shape.batch * (direction == TESSERA_BACKWARD ? shape.heads_kv : shape.heads_q);
    heads_in_parallel = tasks % team.size() == 0 || tasks >= 4 * team.size();
    const bool backward = direction == TESSERA_BACKWARD;
    p = allocate_touched(score_elems());
    if (backward) dp = allocate_touched(score_elems());
    if (backward && program) s = allocate_touched(score_elems());
    if (is_half(dtype)) {
      q = allocate(shape.q_elems());
      k = allocate(shape.k_elems());
      v = allocate(shape.v_elems());
      o = allocate(shape.o_elems());
      if (backward) {
        d_o = allocate(shape.o_elems());
        d_q = allocate(shape.q_elems());
        d_k = allocate(shape.k_elems());
        d_v = allocate(shape.v_elems());
      }
    }
  }

  std::int64_t score_elems() const { return shape.batch * shape.heads_q * shape.seqlen_q * shape.seqlen_k; }

  // The threads that will use a page touch it first, so that no call pays for that.
  Buffer allocate_touched(std::int64_t elems) {
    constexpr std::int64_t kPageElems = 4096 / sizeof(float);
    Buffer buffer = allocate(elems);
    over_ranges(elems, [&](std::int64_t from, std::int64_t count) {
      for (std::int64_t i = from; i < from + count; i += kPageElems) buffer[static_cast<std::size_t>(i)] = 0;
    });
    return buffer;
  }

  // The tensor in float32: itself, or converted into `copy`.
  const float* widen(const void* tensor, Buffer& copy, std::int64_t elems) {
    if (!is_half(dtype)) return static_cast<const float*>(tensor);
    const auto* in = static_cast<const std::uint16_t*>(tensor);
    over_ranges(elems, [&](std::int64_t from, std::int64_t count) {
      (dtype == TESSERA_BFLOAT16 ? loops.from_bf16 : loops.from_f16)(in + from, copy.get() + from, count);
    });
    return copy.get();
  }

  float* widened_output(void* tensor, Buffer& copy) {
    return is_half(dtype) ? copy.get() : static_cast<float*>(tensor);
  }

  void narrow(const Buffer& copy, void* tensor, std::int64_t elems) {
    if (!is_half(dtype)) return;
    auto* out = static_cast<std::uint16_t*>(tensor);
    over_ranges(elems, [&](std::int64_t from, std::int64_t count) {
      (dtype == TESSERA_BFLOAT16 ? loops.to_bf16 : loops.to_f16)(copy.get() + from, out + from, count);
    });
  }

  // A row of scores becomes one of probabilities. With a program a row may see no key: it is 0.
  void probabilities(std::int64_t b, std::int64_t h, std::int64_t i, float* row, std::int64_t visible) const {
    if (visible == 0) return;
    if (!program) return loops.softmax_row(row, visible);
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    if (s) std::copy_n(row, visible, s.get() + ((b * shape.heads_q + h) * shape.seqlen_q + i) * shape.seqlen_k);
    program->score(b, h, i, row, visible);
    std::vector<bool> hidden(static_cast<std::size_t>(visible));
    for (std::int64_t j = 0; j < visible; ++j) hidden[static_cast<std::size_t>(j)] = row[j] == kHidden;
    loops.softmax_row(row, visible);
    for (std::int64_t j = 0; j < visible; ++j) {
      if (hidden[static_cast<std::size_t>(j)]) row[j] = 0;
    }
  }

  // body(from, count) over 0 .. elems - 1, one part for each thread.
  template <typename Body>
  void over_ranges(std::int64_t elems, const Body& body) {
    const std::int64_t share = (elems + team.size() - 1) / team.size();
    team.run([&](int worker) {
      const std::int64_t from = std::min(elems, worker * share);
      body(from, std::min(share, elems - from));
    });
  }

  // body(task, rows) for every task, where rows(count, row_body) runs the row-wise steps on the free threads.
  template <typename Body>
  void over_tasks(std::int64_t tasks, const Body& body) {
    if (heads_in_parallel) {
      blas().set_num_threads(1);
      const auto rows = [](std::int64_t count, const auto& row_body) {
        for (std::int64_t i = 0; i < count; ++i) row_body(i);
      };
      team.for_each(tasks, [&](std::int64_t task) { body(task, rows); });
    } else {
      blas().set_num_threads(team.size());
      const auto rows = [this](std::int64_t count, const auto& row_body) {
        over_ranges(count, [&](std::int64_t from, std::int64_t n) {
          for (std::int64_t i = from; i < from + n; ++i) row_body(i);
        });
      };
      for (std::int64_t task = 0; task < tasks; ++task) body(task, rows);
    }
  }
};

StandardAttention::StandardAttention(const AttentionShape& shape, tessera_dtype dtype, tessera_direction direction,
                                     int threads, const RowProgram* program) {
  blas();  // fails before anything is allocated
  impl_ = std::make_unique<Impl>(shape, dtype, direction, threads, program);
}

StandardAttention::~StandardAttention() = default;

void StandardAttention::forward(const void* q, const void* k, const void* v, void* o) {
  Impl& my = *impl_;
  const AttentionShape& s = my.shape;
  const float* q32 = my.widen(q, my.q, s.q_elems());
  const float* k32 = my.widen(k, my.k, s.k_elems());
  const float* v32 = my.widen(v, my.v, s.v_elems());
  float* o32 = my.widened_output(o, my.o);
  const std::int64_t sq = s.seqlen_q, sk = s.seqlen_k, d = s.head_dim, dv = s.head_dim_v;
  const auto scale = static_cast<float>(s.effective_scale());
  const auto sgemm = blas().sgemm;

  my.over_tasks(s.batch * s.heads_q, [&](std::int64_t task, const auto& rows) {
    const std::int64_t b = task / s.heads_q, h = task % s.heads_q, h_kv = h * s.heads_kv / s.heads_q;
    const float* q_head = q32 + (b * sq * s.heads_q + h) * d;       // [Sq, D], rows Hq D apart
    const float* k_head = k32 + (b * sk * s.heads_kv + h_kv) * d;   // [Sk, D]
    const float* v_head = v32 + (b * sk * s.heads_kv + h_kv) * dv;  // [Sk, Dv]
    float* o_head = o32 + (b * sq * s.heads_q + h) * dv;            // [Sq, Dv]
    float* p = my.p.get() + task * sq * sk;                         // [Sq, Sk]
    sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<blasint>(sq), static_cast<blasint>(sk),
          static_cast<blasint>(d), scale, q_head, static_cast<blasint>(s.heads_q * d), k_head,
          static_cast<blasint>(s.heads_kv * d), 0.0F, p, static_cast<blasint>(sk));
    rows(sq, [&](std::int64_t i) {
      const std::int64_t visible = visible_keys(s, i);
      float* row = p + i * sk;
      my.probabilities(b, h, i, row, visible);
      std::fill(row + visible, row + sk, 0.0F);
    });
    sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<blasint>(sq), static_cast<blasint>(dv),
          static_cast<blasint>(sk), 1.0F, p, static_cast<blasint>(sk), v_head, static_cast<blasint>(s.heads_kv * dv),
          0.0F, o_head, static_cast<blasint>(s.heads_q * dv));
  });
  my.narrow(my.o, o, s.o_elems());
}

void StandardAttention::backward(const void* q, const void* k, const void* v, const void* d_o, void* d_q, void* d_k,
                                 void* d_v) {
  Impl& my = *impl_;
  const AttentionShape& s = my.shape;
  const float* q32 = my.widen(q, my.q, s.q_elems());
  const float* k32 = my.widen(k, my.k, s.k_elems());
  const float* v32 = my.widen(v, my.v, s.v_elems());
  const float* d_o32 = my.widen(d_o, my.d_o, s.o_elems());
  float* d_q32 = my.widened_output(d_q, my.d_q);
  float* d_k32 = my.widened_output(d_k, my.d_k);
  float* d_v32 = my.widened_output(d_v, my.d_v);
  const auto sq = static_cast<blasint>(s.seqlen_q), sk = static_cast<blasint>(s.seqlen_k);
  const auto d = static_cast<blasint>(s.head_dim), dv = static_cast<blasint>(s.head_dim_v);
  const auto q_stride = static_cast<blasint>(s.heads_q * s.head_dim);
  const auto k_stride = static_cast<blasint>(s.heads_kv * s.head_dim);
  const auto v_stride = static_cast<blasint>(s.heads_kv * s.head_dim_v);
  const auto o_stride = static_cast<blasint>(s.heads_q * s.head_dim_v);
  const auto scale = static_cast<float>(s.effective_scale());
  const std::int64_t group = s.heads_q / s.heads_kv;
  const auto sgemm = blas().sgemm;

  my.over_tasks(s.batch * s.heads_kv, [&](std::int64_t task, const auto& rows) {
    const std::int64_t b = task / s.heads_kv, h_kv = task % s.heads_kv;
    const std::int64_t k_at = (b * s.seqlen_k * s.heads_kv + h_kv) * s.head_dim;
    const std::int64_t v_at = (b * s.seqlen_k * s.heads_kv + h_kv) * s.head_dim_v;
    for (std::int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h) {
      const std::int64_t q_at = (b * s.seqlen_q * s.heads_q + h) * s.head_dim;
      const std::int64_t o_at = (b * s.seqlen_q * s.heads_q + h) * s.head_dim_v;
      const std::int64_t scores_at = (b * s.heads_q + h) * s.seqlen_q * s.seqlen_k;
      const float* p = my.p.get() + scores_at;  // [Sq, Sk]
      float* dp = my.dp.get() + scores_at;      // [Sq, Sk]
      const float accumulate = h == h_kv * group ? 0.0F : 1.0F;
      sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, sk, dv, sq, 1.0F, p, sk, d_o32 + o_at, o_stride, accumulate,
            d_v32 + v_at, v_stride);
      sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, sq, sk, dv, 1.0F, d_o32 + o_at, o_stride, v32 + v_at, v_stride,
            0.0F, dp, sk);
      rows(s.seqlen_q, [&](std::int64_t i) {
        const std::int64_t visible = visible_keys(s, i);
        float* row = dp + i * s.seqlen_k;
        my.loops.softmax_grad_row(p + i * s.seqlen_k, row, visible);
        if (my.program) my.program->gradient(b, h, i, my.s.get() + scores_at + i * s.seqlen_k, row, visible);
        std::fill(dp + i * s.seqlen_k + visible, dp + (i + 1) * s.seqlen_k, 0.0F);
      });
      sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, sq, d, sk, scale, dp, sk, k32 + k_at, k_stride, 0.0F,
            d_q32 + q_at, q_stride);
      sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, sk, d, sq, scale, dp, sk, q32 + q_at, q_stride, accumulate,
            d_k32 + k_at, k_stride);
    }
  });
  my.narrow(my.d_q, d_q, s.q_elems());
  my.narrow(my.d_k, d_k, s.k_elems());
  my.narrow(my.d_v, d_v, s.v_elems());
}

std::int64_t StandardAttention::extra_bytes(const AttentionShape& shape, tessera_dtype dtype,
                                            tessera_direction direction, bool has_program) {
  const bool backward = direction == TESSERA_BACKWARD;
  double elems = static_cast<double>(shape.batch) * static_cast<double>(shape.heads_q) *
                 static_cast<double>(shape.seqlen_q) * static_cast<double>(shape.seqlen_k) *
                 (!backward     ? 1
                  : has_program ? 3
                                : 2);
  if (is_half(dtype)) {
    elems += static_cast<double>(shape.q_elems() + shape.k_elems() + shape.v_elems()) * (backward ? 2 : 1);
    elems += static_cast<double>(shape.o_elems()) * (backward ? 2 : 1);
  }
  const double bytes = elems * sizeof(float);
  constexpr double kLargest = 9.2e18;
  return bytes < kLargest ? static_cast<std::int64_t>(bytes) : std::numeric_limits<std::int64_t>::max();
}

}  // namespace tessera::peers
