// The forward pass of a rank.
#include <algorithm>
#include <limits>

#include "distributed/pass.hpp"

namespace tessera::distributed {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// (o, lse) of rows over the keys so far. If calls accumulate, they all add to one float32 sum. Otherwise their results
// are parts in layers, which are merged all at once, in the order of the layers; the layers have the dtype of the
// results, but beyond kMost of them parts are merged on the way, in float32.
// A sink is given to a row's only call. Otherwise it is one more part, (0, sink), before all others; or, if all
// keys of a row may be hidden, which then has no sink, a call without keys adds it after all others.
enum class Partial { kOneCall, kAccumulated, kLayers, kMergedOnTheWay };
constexpr size_t kMost = 8;

class Forward final : public Pass {
 public:
  using Pass::Pass;

  tessera_status make_all(int64_t& saved_bytes) {
    TESSERA_RETURN_IF_ERROR(plan_steps());
    result_ = saved(Base::kSaved, saved_bytes);
    if (!setting_.saves) {
      result_ = in_workspace(result_);
      saved_bytes = 0;
    }
    const Heads hq = schedule_.heads_q, hkv = schedule_.heads_kv;
    q_ = own_tensor(Base::kQ, problem_.heads_q, problem_.head_dim);
    k_ = own_tensor(Base::kK, problem_.heads_kv, problem_.head_dim);
    v_ = own_tensor(Base::kV, problem_.heads_kv, problem_.head_dim_v);
    o_ = own_tensor(Base::kO, problem_.heads_q, problem_.head_dim_v);
    lse_ = {{Base::kLse, 0}, TESSERA_FLOAT32, batch_, local_.rows(), problem_.heads_q, 1, true};
    keys_.k = result_.k, keys_.v = result_.v;
    if (divided_) {
      move_chunks(local_.numbers(), local_, q_, hq.first, own_, result_.q, 0, hq.count);
      move_chunks(local_.numbers(), local_, k_, hkv.first, own_, result_.k, 0, hkv.count);
      move_chunks(local_.numbers(), local_, v_, hkv.first, own_, result_.v, 0, hkv.count);
    }
    for (size_t n = 0; n < steps_.size(); ++n) {
      if (!steps_[n].calls.empty()) last_calls_ = n;
    }
    TESSERA_RETURN_IF_ERROR(walk_steps());
    finish_program();
    return ok();
  }

 private:
  Saved in_workspace(Saved all) {
    const auto place = [this](Slab& slab) {
      if (slab.at.base == Base::kSaved) slab.at = {Base::kWorkspace, arena_.assign(slab.bytes())};
    };
    for (Slab* const slab : {&all.q, &all.k, &all.v, &all.o, &all.lse, &all.lse_low}) place(*slab);
    return all;
  }

  // ---- partial results ----

  // The problem of a call. o: where it writes, at its first row.
  tessera_problem problem_on(const PlannedCall& planned, const KeyBlock& keys, const Slab& o, Call& call) {
    tessera_problem p = problem_of(planned, TESSERA_FORWARD, call);
    const int64_t queries = planned.rows.q_length, k_rows = planned.rows.k_length;
    const bool packed = planned.packed();
    p.q = result_.q.layout(queries, packed);
    p.k = keys.k.layout(k_rows, packed), p.v = keys.v.layout(k_rows, packed);
    p.o = o.layout(queries, packed);
    p.lse = result_.lse.layout(queries, packed), p.lse_low = result_.lse_low.layout(queries, packed);
    return p;
  }

  // True if the kernel that the device would have for the first call can accumulate, too.
  bool accumulates() {
    Call call{};
    tessera_problem p = problem_on(steps_[first_calls()].calls.front(), keys_, result_.o, call);
    tessera_plan plain, accumulating;
    if (tessera_make_plan(&p, &setting_.device, &plain).code != TESSERA_OK) return false;
    p.o.dtype = TESSERA_FLOAT32, p.accumulate = 1;
    if (tessera_make_plan(&p, &setting_.device, &accumulating).code != TESSERA_OK) return false;
    return setting_.device.backend == TESSERA_BACKEND_CPU || std::string(plain.family) == accumulating.family;
  }
  size_t first_calls() const {
    size_t n = 0;
    while (steps_[n].calls.empty()) ++n;
    return n;
  }

  void begin_partial() {
    partial_ = depth_ == 1        ? Partial::kOneCall
               : accumulates()    ? Partial::kAccumulated
               : parts() <= kMost ? Partial::kLayers
                                  : Partial::kMergedOnTheWay;
    const int64_t rows = own_.rows(), heads = result_.o.heads;
    if (partial_ == Partial::kAccumulated) {
      sum_ = problem_.dtype == TESSERA_FLOAT32 ? result_.o : make(TESSERA_FLOAT32, rows, heads, problem_.head_dim_v);
      fill(sum_, 0), fill(result_.lse_low, 0);
      sink_first() ? fill_with_sink(result_.lse) : fill(result_.lse, kNothing);
    } else if (partial_ != Partial::kOneCall) {
      layers_ = Layers(0);
      const auto count = static_cast<int64_t>(num_layers());
      const int32_t dtype = partial_ == Partial::kLayers ? problem_.dtype : static_cast<int32_t>(TESSERA_FLOAT32);
      all_o_ = make(dtype, count * rows, heads, problem_.head_dim_v);
      all_lse_ = make_statistics(count * rows, heads), all_low_ = make_statistics(count * rows, heads);
      empty_layers();
      if (!sink_first()) return;
      fill(layer(all_o_, 0), 0), fill_with_sink(layer(all_lse_, 0));
      layers_ = Layers(1), first_layer_ = 1;
    }
  }
  void fill_with_sink(const Slab& lse) {
    const Slab sink{of_heads(Base::kSink), TESSERA_FLOAT32, 1, 1, lse.heads, 1};
    program_.operations.emplace_back(Move{{batch_, lse.rows, lse.heads, 1},
                                          {sink.at, sink.dtype, 0, 0, sink.head_stride()},
                                          {lse.at, lse.dtype, lse.batch_stride(), lse.row_stride(), lse.head_stride()},
                                          false});
  }
  void empty_layers() { fill(all_lse_, kNothing), fill(all_low_, 0); }

  Slab layer(const Slab& all, size_t n) const {
    Slab slab = all;
    slab.rows = own_.rows();
    slab.at.offset += static_cast<int64_t>(n) * slab.bytes();
    return slab;
  }
  bool sink_first() const { return has_sink() && !may_hide_rows(); }
  size_t parts() const { return depth_ + (sink_first() ? 1 : 0); }
  size_t num_layers() const { return std::min(parts(), kMost); }

  void merge_layers(const Slab& o, const Slab& lse, const Slab& low) {
    Merge merge{};
    merge.merge.struct_size = sizeof merge.merge;
    const auto parts = [this](const Slab& all) {
      const Slab one = layer(all, 0);
      const tessera_layout of_one = one.layout(one.rows);
      tessera_layout of_all{of_one.dtype, of_one.rank + 1, {}, {}};
      of_all.shape[0] = static_cast<int64_t>(num_layers()), of_all.strides[0] = one.elements();
      std::copy_n(of_one.shape, of_one.rank, of_all.shape + 1);
      std::copy_n(of_one.strides, of_one.rank, of_all.strides + 1);
      return of_all;
    };
    merge.merge.o_parts.layout = parts(all_o_);
    merge.merge.lse_parts.layout = parts(all_lse_), merge.merge.lse_low_parts.layout = parts(all_low_);
    merge.merge.o.layout = o.layout(o.rows);
    merge.merge.lse.layout = lse.layout(lse.rows), merge.merge.lse_low.layout = low.layout(low.rows);
    merge.o_parts = all_o_.at, merge.lse_parts = all_lse_.at, merge.lse_low_parts = all_low_.at;
    merge.o = o.at, merge.lse = lse.at, merge.lse_low = low.at;
    program_.operations.emplace_back(merge);
  }

  // The layer for a call's rows. Once all are in use, they are merged into the first.
  size_t layer_for(const Rectangle& rows) {
    const Range range{rows.q_row, rows.q_end()};
    size_t n = layers_.place(range, first_layer_);
    if (n < num_layers()) return n;
    const Slab o = make(TESSERA_FLOAT32, own_.rows(), result_.o.heads, problem_.head_dim_v);
    const Slab lse = make_statistics(own_.rows(), o.heads), low = make_statistics(own_.rows(), o.heads);
    merge_layers(o, lse, low);
    empty_layers();
    move(o, 0, 0, layer(all_o_, 0), 0, 0, o.rows, o.heads);
    move(lse, 0, 0, layer(all_lse_, 0), 0, 0, o.rows, o.heads);
    move(low, 0, 0, layer(all_low_, 0), 0, 0, o.rows, o.heads);
    release(o), release(lse), release(low);
    layers_ = Layers(1), first_layer_ = 1;
    return layers_.place(range, first_layer_);
  }

  tessera_status finish_partial() {
    if (partial_ == Partial::kOneCall) return ok();
    const bool sink_last = has_sink() && !sink_first(), rounds = problem_.dtype != TESSERA_FLOAT32;
    if (partial_ != Partial::kAccumulated) {
      const bool wide = sink_last && rounds;
      sum_ = wide ? make(TESSERA_FLOAT32, own_.rows(), result_.o.heads, problem_.head_dim_v) : result_.o;
      merge_layers(sum_, result_.lse, result_.lse_low);
      release(all_o_), release(all_lse_), release(all_low_);
      if (!sink_last) return ok();
    }
    if (sink_last) {
      TESSERA_RETURN_IF_ERROR(add_sink());
    } else if (rounds) {
      move(sum_, 0, 0, result_.o, 0, 0, own_.rows(), sum_.heads);
    }
    if (rounds) release(sum_);
    return ok();
  }

  // Adds the sink to sum_ in rows that see a key, and rounds the result.
  tessera_status add_sink() {
    const int64_t rows = own_.rows();
    tessera_problem p;
    tessera_problem_init(&p);
    p.direction = TESSERA_FORWARD;
    p.q = result_.q.layout(rows), p.k = result_.k.layout(0), p.v = result_.v.layout(0), p.o = result_.o.layout(rows);
    p.lse = result_.lse.layout(rows), p.lse_low = result_.lse_low.layout(rows);
    p.accumulate = 1, p.sink = sink_layout();
    Call call{};
    if (problem_.dtype != TESSERA_FLOAT32) p.o_accum = sum_.layout(rows), call.o_accum = sum_.at;
    TESSERA_RETURN_IF_ERROR(plan_call(p, call, true));
    call.q = result_.q.at, call.o = result_.o.at, call.sink = of_heads(Base::kSink);
    call.lse = result_.lse.at, call.lse_low = result_.lse_low.at;
    add_call(call);
    return ok();
  }

  // ---- steps ----

  tessera_status compute(size_t step, const std::vector<PlannedCall>& calls) override {
    if (step == first_calls()) begin_partial();
    for (const PlannedCall& planned : calls) {
      const Rectangle& rows = planned.rows;
      const KeyBlock& keys = key_block(planned.keys);
      Slab o = result_.o, lse = result_.lse, low = result_.lse_low, rounded;
      if (partial_ == Partial::kAccumulated) {
        o = sum_;
      } else if (partial_ != Partial::kOneCall) {
        const size_t n = layer_for(rows);
        o = layer(all_o_, n), lse = layer(all_lse_, n), low = layer(all_low_, n);
      }
      // A call's result has its dtype, unless it accumulates.
      const bool converts = partial_ == Partial::kMergedOnTheWay && problem_.dtype != TESSERA_FLOAT32;
      if (converts) rounded = make(problem_.dtype, rows.q_length, o.heads, o.columns);
      Call call{};
      tessera_problem p = problem_on(planned, keys, converts ? rounded : o, call);
      p.accumulate = partial_ == Partial::kAccumulated;
      if (has_sink() && partial_ == Partial::kOneCall) {
        p.sink = sink_layout(), call.sink = of_heads(Base::kSink);
      }
      TESSERA_RETURN_IF_ERROR(plan_call(p, call));
      call.q = result_.q.ref(rows.q_row), call.k = keys.k.ref(rows.k_row), call.v = keys.v.ref(rows.k_row);
      call.o = converts ? rounded.at : o.ref(rows.q_row);
      call.lse = lse.ref(rows.q_row), call.lse_low = low.ref(rows.q_row);
      add_call(call);
      if (!converts) continue;
      move(rounded, 0, 0, o, rows.q_row, 0, rows.q_length, o.heads);
      release(rounded);
    }
    if (step != last_calls_) return ok();
    TESSERA_RETURN_IF_ERROR(finish_partial());
    if (divided_) {
      const Heads hq = schedule_.heads_q;
      move_chunks(local_.numbers(), own_, result_.o, 0, local_, o_, hq.first, hq.count);
      move_chunks(local_.numbers(), own_, result_.lse, 0, local_, lse_, hq.first, hq.count);
    }
    return ok();
  }

  void prepare(const Message& message) override {
    if (message.travels == TESSERA_TRAVELS_KV && !in_group(message.peer)) {
      if (message.receive) return receive_keys(message);
      add_rows(message, own_, keys_.k);
      add_rows(message, own_, keys_.v);
      return;
    }
    const auto exchange_all = [&](const Slab& from, const Block& block, int64_t head) {
      exchange(message, from, block, head, stage(message, from.dtype, from.columns, from.statistics));
    };
    if (message.travels == TESSERA_TRAVELS_O) {
      exchange_all(result_.o, own_, 0);
      exchange_all(result_.lse, own_, 0);
    } else if (message.travels == TESSERA_TRAVELS_Q) {
      exchange_all(q_, local_, message.first_head);
    } else {
      exchange_all(k_, local_, message.first_head);
      exchange_all(v_, local_, message.first_head);
    }
  }

  void deliver(const Message& message) override {
    const Block rows(schedule_.chunks, message.chunks);
    if (message.travels == TESSERA_TRAVELS_KV && !in_group(message.peer)) {
      fetched_.push_back({rows, staged(message, 0), staged(message, 1), {}, {}});
      return;
    }
    const auto take = [&](size_t number, const Block& block, const Slab& to, int64_t head) {
      const Slab& slab = staged(message, number);
      move_chunks(message.chunks, rows, slab, 0, block, to, head, message.num_heads);
      release(slab);
    };
    if (message.travels == TESSERA_TRAVELS_O) {
      take(0, local_, o_, message.first_head);
      take(1, local_, lse_, message.first_head);
    } else if (message.travels == TESSERA_TRAVELS_Q) {
      take(0, own_, result_.q, 0);
    } else {
      take(0, own_, result_.k, 0);
      take(1, own_, result_.v, 0);
    }
  }

  Saved result_{};            // of the group's rows and this rank's heads
  Slab q_, k_, v_, o_, lse_;  // the caller's
  Partial partial_ = Partial::kOneCall;
  Slab sum_, all_o_, all_lse_, all_low_;
  Layers layers_;
  size_t first_layer_ = 0;  // 1: layer 0 holds what is merged
  size_t last_calls_ = 0;
};

}  // namespace

tessera_status make_forward(const tessera_ranks_plan& plan, const Setting& setting, Program& program,
                            int64_t& saved_bytes) {
  program.plan = plan;
  return Forward(program.plan, setting, program).make_all(saved_bytes);
}

}  // namespace tessera::distributed
