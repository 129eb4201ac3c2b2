// The backward pass of a rank. Gradients are sums in float32, rounded at the end.
#include <algorithm>
#include <tuple>

#include "core/geometry.hpp"
#include "core/validate.hpp"
#include "distributed/pass.hpp"

namespace tessera::distributed {
namespace {

class Backward final : public Pass {
 public:
  using Pass::Pass;

  tessera_status make_all() {
    TESSERA_RETURN_IF_ERROR(plan_steps());
    int64_t saved_bytes = 0;
    saved_ = saved(Base::kSaved, saved_bytes);
    keys_.k = saved_.k, keys_.v = saved_.v;
    whole_d_o_ = own_tensor(Base::kDO, problem_.heads_q, problem_.head_dim_v);
    d_q_ = own_tensor(Base::kDQ, problem_.heads_q, problem_.head_dim);
    d_k_ = own_tensor(Base::kDK, problem_.heads_kv, problem_.head_dim);
    d_v_ = own_tensor(Base::kDV, problem_.heads_kv, problem_.head_dim_v);
    const Heads hq = schedule_.heads_q, hkv = schedule_.heads_kv;
    d_o_ = whole_d_o_;
    if (divided_) {
      d_o_ = make(problem_.dtype, own_.rows(), hq.count, problem_.head_dim_v);
      move_chunks(local_.numbers(), local_, whole_d_o_, hq.first, own_, d_o_, 0, hq.count);
    }
    sum_q_ = zeros(own_.rows(), hq.count, problem_.head_dim);
    keys_.sum_k = zeros(own_.rows(), hkv.count, problem_.head_dim);
    keys_.sum_v = zeros(own_.rows(), hkv.count, problem_.head_dim_v);
    begin_captured();
    if (const tessera_layout d_bias = d_bias_layout(setting_.options); core::elements(d_bias) > 0) {
      program_.operations.emplace_back(Fill{{Base::kDBias, 0}, 0, core::elements(d_bias)});
    }
    TESSERA_RETURN_IF_ERROR(walk_steps());
    if (has_sink()) TESSERA_RETURN_IF_ERROR(add_sink_gradient());
    divided_ ? finish_divided() : finish();
    finish_program();
    return ok();
  }

 private:
  Slab zeros(int64_t rows, int64_t heads, int64_t columns) {
    const Slab slab = make(TESSERA_FLOAT32, rows, heads, columns);
    fill(slab, 0);
    return slab;
  }

  // The sums for a block of keys, which outlive the keys until they have been sent to their owner.
  std::pair<Slab, Slab> sums_of(const KeyBlock& keys) {
    if (keys.block.numbers() == own_.numbers()) return {keys_.sum_k, keys_.sum_v};
    for (const Returned& sums : returned_) {
      if (sums.block.numbers() == keys.block.numbers()) return {sums.k, sums.v};
    }
    const int64_t rows = keys.block.rows(), heads = keys.k.heads;
    returned_.push_back({keys.block, zeros(rows, heads, problem_.head_dim), zeros(rows, heads, problem_.head_dim_v),
                         keys.block.numbers()});
    return {returned_.back().k, returned_.back().v};
  }

  tessera_problem problem_on(const PlannedCall& planned, const KeyBlock& keys, Call& call) {
    tessera_problem p = problem_of(planned, TESSERA_BACKWARD, call);
    const int64_t queries = planned.rows.q_length, k_rows = planned.rows.k_length;
    const bool packed = planned.packed();
    p.q = saved_.q.layout(queries, packed), p.o = saved_.o.layout(queries, packed);
    p.d_o = d_o_.layout(queries, packed);
    p.k = keys.k.layout(k_rows, packed), p.v = keys.v.layout(k_rows, packed);
    p.lse = saved_.lse.layout(queries, packed), p.lse_low = saved_.lse_low.layout(queries, packed);
    return p;
  }
  static void add_gradients(tessera_problem& p, const PlannedCall& planned, const Slab& q, const Slab& k,
                            const Slab& v) {
    const int64_t k_rows = planned.rows.k_length;
    p.d_q = q.layout(planned.rows.q_length, planned.packed());
    p.d_k = k.layout(k_rows, planned.packed()), p.d_v = v.layout(k_rows, planned.packed());
  }

  tessera_status compute(size_t, const std::vector<PlannedCall>& calls) override {
    std::vector<const KeyBlock*> used;
    for (const PlannedCall& planned : calls) {
      const Rectangle& rows = planned.rows;
      const KeyBlock& keys = key_block(planned.keys);
      if (std::find(used.begin(), used.end(), &keys) == used.end()) used.push_back(&keys);
      const auto [sum_k, sum_v] = sums_of(keys);
      Call call{};
      tessera_problem p = problem_on(planned, keys, call);
      const Slab d_bias = begin_bias(p);
      call.d_bias = d_bias.at;
      add_gradients(p, planned, sum_q_, sum_k, sum_v);
      p.accumulate = 1;
      const bool adds = accumulates(p);
      Slab q, k, v;
      if (!adds) {
        q = make(problem_.dtype, rows.q_length, sum_q_.heads, sum_q_.columns);
        k = make(problem_.dtype, rows.k_length, sum_k.heads, sum_k.columns);
        v = make(problem_.dtype, rows.k_length, sum_v.heads, sum_v.columns);
        add_gradients(p, planned, q, k, v);
        p.accumulate = 0;
      }
      TESSERA_RETURN_IF_ERROR(plan_call(p, call));
      call.q = saved_.q.ref(rows.q_row), call.k = keys.k.ref(rows.k_row), call.v = keys.v.ref(rows.k_row);
      call.o = saved_.o.ref(rows.q_row), call.d_o = d_o_.ref(rows.q_row);
      call.lse = saved_.lse.ref(rows.q_row), call.lse_low = saved_.lse_low.ref(rows.q_row);
      call.d_q = adds ? sum_q_.ref(rows.q_row) : q.at;
      call.d_k = adds ? sum_k.ref(rows.k_row) : k.at, call.d_v = adds ? sum_v.ref(rows.k_row) : v.at;
      for (const Captured& captured : captured_) call.d_captured[captured.number] = captured.part.at;
      add_call(call);
      add_captured();
      add_bias(rows, d_bias);
      if (adds) continue;
      move(q, 0, 0, sum_q_, rows.q_row, 0, rows.q_length, q.heads, true);
      move(k, 0, 0, sum_k, rows.k_row, 0, rows.k_length, k.heads, true);
      move(v, 0, 0, sum_v, rows.k_row, 0, rows.k_length, v.heads, true);
      release(q), release(k), release(v);
    }
    for (const KeyBlock* keys : used) take_own(*keys);
    return ok();
  }

  // Of a block with keys of several ranks: the part of this rank's own keys.
  void take_own(const KeyBlock& keys) {
    if (keys.block.numbers() == own_.numbers()) return;
    std::vector<int64_t> mine;
    for (const int64_t number : keys.block.numbers()) {
      if (own_.has(number)) mine.push_back(number);
    }
    const auto [sum_k, sum_v] = sums_of(keys);
    move_chunks(mine, keys.block, sum_k, 0, own_, keys_.sum_k, 0, sum_k.heads, true);
    move_chunks(mine, keys.block, sum_v, 0, own_, keys_.sum_v, 0, sum_v.heads, true);
    for (Returned& sums : returned_) {
      if (sums.block.numbers() != keys.block.numbers()) continue;
      std::erase_if(sums.unsent, [&](int64_t number) { return own_.has(number); });
    }
  }

  // The gradients of captured tensors are sums over the calls, each of which writes its own part.
  void begin_captured() {
    for (int n = 0; n < TESSERA_MAX_CAPTURED_TENSORS; ++n) {
      const tessera_layout layout = d_captured_layout(setting_.options, n);
      if (!core::present(layout)) continue;
      const int64_t columns = layout.shape[layout.rank - 1], elements = core::elements(layout);
      Slab part{{Base::kWorkspace, 0}, TESSERA_FLOAT32, 1, columns > 0 ? elements / columns : 0, 1, columns};
      part.at.offset = arena_.assign(part.bytes());
      captured_.push_back({n, part});
      if (elements > 0) program_.operations.emplace_back(Fill{{d_captured(n), 0}, 0, elements});
    }
  }
  void add_captured() {
    for (const auto& [number, part] : captured_) {
      if (part.elements() == 0) continue;
      const auto rows = [&part = part](const Ref& at) {
        return RowsRef{at, part.dtype, part.batch_stride(), part.row_stride(), part.head_stride()};
      };
      const core::RowsShape shape{1, part.rows, 1, part.columns};
      program_.operations.emplace_back(Move{shape, rows(part.at), rows({d_captured(number), 0}), true});
    }
  }

  // Likewise that of the bias: a call's own part is a slab, whose memory add_bias releases.
  Slab begin_bias(tessera_problem& p) {
    if (setting_.options.grad_bias == 0) return {};
    const int64_t* shape = p.bias.shape;
    Slab part{{Base::kWorkspace, 0}, TESSERA_FLOAT32, shape[0], shape[2], shape[1], shape[3]};
    part.at.offset = arena_.assign(part.bytes());
    p.d_bias = {TESSERA_FLOAT32,
                4,
                {shape[0], shape[1], shape[2], shape[3]},
                {part.batch_stride(), part.head_stride(), part.row_stride(), 1}};
    return part;
  }
  void add_bias(const Rectangle& rows, const Slab& part) {
    if (part.elements() == 0) return;
    Ref at;
    const tessera_layout to = part_of(d_bias_layout(setting_.options), rows, Base::kDBias, at);
    program_.operations.emplace_back(
        Move{{part.batch, part.rows, part.heads, part.columns},
             {part.at, part.dtype, part.batch_stride(), part.row_stride(), part.head_stride()},
             {at, to.dtype, to.strides[0], to.strides[2], to.strides[1]},
             true});
    release(part);
  }

  // dSink of a head is the sum over rows of -exp(sink - lse) (dO . O), which needs no key: by a call without keys.
  // Its dQ is 0.
  tessera_status add_sink_gradient() {
    program_.operations.emplace_back(Fill{{Base::kDSink, 0}, 0, problem_.heads_q});
    if (own_.rows() == 0) return ok();
    const int64_t rows = own_.rows();
    tessera_problem p;
    tessera_problem_init(&p);
    p.direction = TESSERA_BACKWARD;
    p.q = saved_.q.layout(rows), p.o = saved_.o.layout(rows), p.d_o = d_o_.layout(rows);
    p.k = saved_.k.layout(0), p.v = saved_.v.layout(0);
    p.lse = saved_.lse.layout(rows), p.lse_low = saved_.lse_low.layout(rows);
    const Slab no_q = make(problem_.dtype, rows, sum_q_.heads, sum_q_.columns);
    p.d_q = no_q.layout(rows), p.d_k = p.k, p.d_v = p.v;
    p.sink = p.d_sink = sink_layout();
    Call call{};
    TESSERA_RETURN_IF_ERROR(plan_call(p, call));
    call.q = saved_.q.at, call.o = saved_.o.at, call.d_o = d_o_.at;
    call.lse = saved_.lse.at, call.lse_low = saved_.lse_low.at;
    call.d_q = no_q.at, call.sink = of_heads(Base::kSink), call.d_sink = of_heads(Base::kDSink);
    add_call(call);
    release(no_q);
    return ok();
  }

  bool accumulates(const tessera_problem& p) const {
    if (setting_.device.backend == TESSERA_BACKEND_CPU) return true;
    tessera_plan plan;
    return tessera_make_plan(&p, &setting_.device, &plan).code == TESSERA_OK;
  }

  // ---- messages ----

  void prepare(const Message& message) override {
    if (message.travels == TESSERA_TRAVELS_KV) {
      if (message.receive) return receive_keys(message);
      add_rows(message, own_, keys_.k);
      add_rows(message, own_, keys_.v);
      return;
    }
    if (message.travels == TESSERA_TRAVELS_D_KV && !in_group(message.peer)) {
      message.receive ? receive_sums(message) : send_sums(message);
      return;
    }
    const int32_t dtype = message.partial ? static_cast<int32_t>(TESSERA_FLOAT32) : problem_.dtype;
    const auto exchange_all = [&](const Slab& from, const Block& block, int64_t head) {
      exchange(message, from, block, head, stage(message, dtype, from.columns));
    };
    if (message.travels == TESSERA_TRAVELS_D_O) {
      exchange_all(whole_d_o_, local_, message.first_head);
    } else if (message.travels == TESSERA_TRAVELS_D_Q) {
      exchange_all(sum_q_, own_, 0);
    } else {
      exchange_all(keys_.sum_k, own_, 0);
      exchange_all(keys_.sum_v, own_, 0);
    }
  }

  void receive_sums(const Message& message) {
    const Block rows(schedule_.chunks, message.chunks);
    const Slab k = stage(message, TESSERA_FLOAT32, problem_.head_dim);
    const Slab v = stage(message, TESSERA_FLOAT32, problem_.head_dim_v);
    add_rows(message, rows, k), add_rows(message, rows, v);
    keep_staged(message, k), keep_staged(message, v);
  }

  void send_sums(const Message& message) {
    const auto sums = std::find_if(returned_.begin(), returned_.end(), [&](const Returned& candidate) {
      return std::find(candidate.unsent.begin(), candidate.unsent.end(), message.chunks.front()) !=
             candidate.unsent.end();
    });
    add_rows(message, sums->block, sums->k), add_rows(message, sums->block, sums->v);
    std::erase_if(sums->unsent, [&](int64_t number) {
      return std::find(message.chunks.begin(), message.chunks.end(), number) != message.chunks.end();
    });
    if (!sums->unsent.empty()) return;
    release_at_end_of_step(sums->k), release_at_end_of_step(sums->v);
    returned_.erase(sums);
  }

  void deliver(const Message& message) override {
    const Block rows(schedule_.chunks, message.chunks);
    const auto add = [&](size_t number, const Slab& to) {
      const Slab& slab = staged(message, number);
      move_chunks(message.chunks, rows, slab, 0, own_, to, 0, message.num_heads, true);
      release(slab);
    };
    const auto take = [&](const Block& block, const Slab& to, int64_t head) {
      const Slab& slab = staged(message, 0);
      move_chunks(message.chunks, rows, slab, 0, block, to, head, message.num_heads);
      release(slab);
    };
    if (message.travels == TESSERA_TRAVELS_KV) {
      fetched_.push_back({rows, staged(message, 0), staged(message, 1), {}, {}});
    } else if (message.travels == TESSERA_TRAVELS_D_O) {
      take(own_, d_o_, 0);
    } else if (message.travels == TESSERA_TRAVELS_D_Q) {
      take(local_, d_q_, message.first_head);
    } else if (in_group(message.peer)) {
      parts_.push_back(
          {message.peer, message.first_head, rows, staged(message, 0), staged(message, 1), message.partial});
    } else {
      add(0, keys_.sum_k), add(1, keys_.sum_v);
    }
  }

  // ---- results ----

  void finish() {
    move(sum_q_, 0, 0, d_q_, 0, 0, d_q_.rows, d_q_.heads);
    move(keys_.sum_k, 0, 0, d_k_, 0, 0, d_k_.rows, d_k_.heads);
    move(keys_.sum_v, 0, 0, d_v_, 0, 0, d_v_.rows, d_v_.heads);
  }

  // Joins the heads that this rank computed for its own rows with those that it received. If several ranks read one KV
  // head, their sums are added in float32, in the order of the ranks.
  void finish_divided() {
    const Heads hq = schedule_.heads_q, hkv = schedule_.heads_kv;
    move_chunks(local_.numbers(), own_, sum_q_, 0, local_, d_q_, hq.first, hq.count);
    const bool partial = std::any_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.partial; });
    Slab k = d_k_, v = d_v_;
    if (partial) {
      k = zeros(local_.rows(), d_k_.heads, d_k_.columns), v = zeros(local_.rows(), d_v_.heads, d_v_.columns);
    }
    parts_.push_back({setting_.rank, hkv.first, own_, keys_.sum_k, keys_.sum_v, partial});
    std::stable_sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) { return a.rank < b.rank; });
    for (const Part& part : parts_) {
      const std::vector<int64_t>& chunks = part.rank == setting_.rank ? local_.numbers() : part.rows.numbers();
      move_chunks(chunks, part.rows, part.k, 0, local_, k, part.first_head, part.k.heads, partial);
      move_chunks(chunks, part.rows, part.v, 0, local_, v, part.first_head, part.v.heads, partial);
    }
    if (!partial) return;
    move(k, 0, 0, d_k_, 0, 0, k.rows, k.heads);
    move(v, 0, 0, d_v_, 0, 0, v.rows, v.heads);
  }

  struct Returned {
    Block block;
    Slab k, v;
    std::vector<int64_t> unsent;  // chunks
  };
  struct Captured {
    int number;
    Slab part;  // of one call
  };
  struct Part {
    int32_t rank, first_head;
    Block rows;
    Slab k, v;
    bool partial;
  };

  Saved saved_{};
  Slab whole_d_o_, d_o_, d_q_, d_k_, d_v_;
  Slab sum_q_;
  std::vector<Returned> returned_;
  std::vector<Part> parts_;
  std::vector<Captured> captured_;
};

}  // namespace

tessera_status make_backward(const tessera_ranks_plan& plan, const Setting& setting, Program& program) {
  program.plan = plan;
  return Backward(program.plan, setting, program).make_all();
}

}  // namespace tessera::distributed
