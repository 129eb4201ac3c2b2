#include "distributed/pass.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>

namespace tessera::distributed {
namespace {

std::vector<int64_t> chunks_of(const std::vector<tessera_chunk>& chunks, int32_t first_rank, int32_t ranks) {
  std::vector<int64_t> numbers;
  for (size_t n = 0; n < chunks.size(); ++n) {
    if (chunks[n].rank >= first_rank && chunks[n].rank < first_rank + ranks) numbers.push_back(static_cast<int64_t>(n));
  }
  return numbers;
}

// A call with a place and dropout begins at a multiple of this many keys.
constexpr int64_t kDropoutKeys = 32;

}  // namespace

Pass::Pass(const tessera_ranks_plan& plan, const Setting& setting, Program& program)
    : plan_(plan),
      problem_(plan.problem),
      setting_(setting),
      program_(program),
      schedule_(schedule_of(plan, setting.rank)),
      batch_(plan.problem.batch),
      divided_(plan.problem.head_ranks > 1),
      local_(schedule_.chunks, chunks_of(schedule_.chunks, setting.rank, 1)),
      own_(schedule_.chunks,
           chunks_of(schedule_.chunks, setting.rank / plan.problem.head_ranks * plan.problem.head_ranks,
                     plan.problem.head_ranks)),
      keys_{own_, {}, {}, {}, {}} {}

// ---- the memory -----------------------------------------------------------------------------------------------------

Slab Pass::make(int32_t dtype, int64_t rows, int64_t heads, int64_t columns) {
  Slab slab{{Base::kWorkspace, 0}, dtype, batch_, rows, heads, columns};
  slab.at.offset = arena_.assign(slab.bytes());
  return slab;
}

Slab Pass::make_statistics(int64_t rows, int64_t heads) {
  Slab slab = make(TESSERA_FLOAT32, rows, heads, 1);
  slab.statistics = true;
  return slab;
}

void Pass::release(const Slab& slab) {
  if (slab.at.base == Base::kWorkspace && slab.bytes() > 0) arena_.release(slab.at.offset);
}

Slab Pass::own_tensor(Base base, int64_t heads, int64_t columns) const {
  return {{base, 0}, problem_.dtype, batch_, local_.rows(), heads, columns};
}

Pass::Saved Pass::saved(Base base, int64_t& bytes) const {
  Arena arena;
  const auto place = [&](Slab slab) {
    slab.at = {base, arena.assign(slab.bytes())};
    return slab;
  };
  const int64_t rows = own_.rows(), hq = schedule_.heads_q.count, hkv = schedule_.heads_kv.count;
  const Slab statistics{{}, TESSERA_FLOAT32, batch_, rows, hq, 1, true};
  Saved all;
  all.lse_low = place(statistics);
  if (divided_) {
    all.q = place({{}, problem_.dtype, batch_, rows, hq, problem_.head_dim});
    all.k = place({{}, problem_.dtype, batch_, rows, hkv, problem_.head_dim});
    all.v = place({{}, problem_.dtype, batch_, rows, hkv, problem_.head_dim_v});
    all.o = place({{}, problem_.dtype, batch_, rows, hq, problem_.head_dim_v});
    all.lse = place(statistics);
  } else {
    all.q = own_tensor(Base::kQ, hq, problem_.head_dim);
    all.k = own_tensor(Base::kK, hkv, problem_.head_dim);
    all.v = own_tensor(Base::kV, hkv, problem_.head_dim_v);
    all.o = own_tensor(Base::kO, hq, problem_.head_dim_v);
    all.lse = statistics, all.lse.at = {Base::kLse, 0};
  }
  bytes = arena.bytes();
  return all;
}

// ---- operations -----------------------------------------------------------------------------------------------------

void Pass::fill(const Slab& slab, float value) {
  constexpr int64_t kBytes = sizeof(float);  // two elements of a 16-bit type, of which all bits of 0 are 0
  const int64_t count = (slab.bytes() + kBytes - 1) / kBytes;
  if (count > 0) program_.operations.emplace_back(Fill{slab.at, value, count});
}

void Pass::move(const Slab& from, int64_t from_row, int64_t from_head, const Slab& to, int64_t to_row, int64_t to_head,
                int64_t count, int64_t heads, bool add) {
  const core::RowsShape shape{batch_, count, heads, from.columns};
  if (shape.batch * shape.rows * shape.heads * shape.columns == 0) return;
  const auto rows = [](const Slab& slab, int64_t row, int64_t head) {
    return RowsRef{slab.ref(row, head), slab.dtype, slab.batch_stride(), slab.row_stride(), slab.head_stride()};
  };
  program_.operations.emplace_back(Move{shape, rows(from, from_row, from_head), rows(to, to_row, to_head), add});
}

void Pass::exchange(const Message& message, const Slab& from, const Block& block, int64_t head, const Slab& slab) {
  if (message.receive) {
    keep_staged(message, slab);
  } else {
    const Block rows(schedule_.chunks, message.chunks);
    move_chunks(message.chunks, block, from, head, rows, slab, 0, message.num_heads);
  }
  add_staged(message, slab);
}

void Pass::move_chunks(const std::vector<int64_t>& chunks, const Block& from_block, const Slab& from, int64_t from_head,
                       const Block& to_block, const Slab& to, int64_t to_head, int64_t heads, bool add) {
  int64_t from_row = 0, to_row = 0, count = 0;
  for (const int64_t number : chunks) {  // neighbours in both as one
    const int64_t a = from_block.row(number), b = to_block.row(number);
    if (count > 0 && (a != from_row + count || b != to_row + count)) {
      move(from, from_row, from_head, to, to_row, to_head, count, heads, add);
      count = 0;
    }
    if (count == 0) from_row = a, to_row = b;
    count += from_block.chunk(number).length;
  }
  move(from, from_row, from_head, to, to_row, to_head, count, heads, add);
}

tessera_status Pass::plan_call(const tessera_problem& problem, Call& call, bool any_family) {
  const std::string bytes(reinterpret_cast<const char*>(&problem), sizeof problem);
  const auto found = plan_numbers_.find(bytes);
  if (found != plan_numbers_.end()) {
    call.plan = found->second;
    return ok();
  }
  tessera_device device = setting_.device;
  if (any_family) device.family[0] = '\0';
  tessera_plan plan;
  TESSERA_RETURN_IF_ERROR(tessera_make_plan(&problem, &device, &plan));
  call.plan = program_.plans.size();
  plan_numbers_.emplace(bytes, call.plan);
  program_.plans.push_back(plan);
  return ok();
}

void Pass::add_call(Call call) {
  const int64_t bytes = program_.plans[call.plan].workspace_bytes;
  call.workspace = {Base::kWorkspace, arena_.assign(bytes)};
  program_.operations.emplace_back(call);
  if (bytes > 0) arena_.release(call.workspace.offset);
}

tessera_layout Pass::part_of(const tessera_layout& whole, const Rectangle& rows, Base base, Ref& at) const {
  const int64_t first[] = {problem_.num_sequences > 1 ? rows.sequence : 0, schedule_.heads_q.first, rows.q_begin,
                           rows.k_begin};
  const int64_t count[] = {batch_, schedule_.heads_q.count, rows.q_length, rows.k_length};
  tessera_layout part = whole;
  int64_t element = 0;
  for (int axis = 0; axis < 4; ++axis) {
    if (axis < 3 && whole.shape[axis] == 1) continue;  // broadcast
    part.shape[axis] = count[axis];
    element += first[axis] * whole.strides[axis];
  }
  at = {base, element * static_cast<int64_t>(tessera_dtype_bytes(whole.dtype))};
  return part;
}

Ref Pass::constant(const std::vector<int32_t>& values) {
  std::vector<int32_t>& all = program_.constants;
  const auto [found, added] = constants_.emplace(values, static_cast<int64_t>(all.size() * sizeof(int32_t)));
  if (added) all.insert(all.end(), values.begin(), values.end());
  return {Base::kConstants, found->second};
}

tessera_problem Pass::problem_of(const PlannedCall& planned, int32_t direction, Call& call) {
  const tessera_ranks_options& options = setting_.options;
  const Rectangle& rows = planned.rows;
  tessera_problem p;
  tessera_problem_init(&p);
  p.direction = direction;
  p.scale = options.scale, p.has_scale = options.has_scale, p.softcap = options.softcap;
  p.deterministic = direction == TESSERA_BACKWARD ? options.deterministic : 0;
  const std::vector<Rectangle>& all = planned.sequences;
  const bool any_causal =
      planned.packed() ? std::any_of(all.begin(), all.end(), [](const auto& r) { return r.causal(); }) : rows.causal();
  if (planned.packed()) {
    const Packing packing = packing_of(all, placed(), problem_.lengths);
    const auto count = static_cast<int64_t>(packing.cu_q.size());
    p.cu_seqlens_q = p.cu_seqlens_k = {TESSERA_INT32, 1, {count}, {1}};
    call.cu_q = constant(packing.cu_q), call.cu_k = constant(packing.cu_k);
    p.max_seqlen_q = packing.max_q, p.max_seqlen_k = packing.max_k;
    // Full rectangles beside causal ones are given places in which these see all of their keys.
    if (placed() || (any_causal && std::any_of(all.begin(), all.end(), [](const auto& r) { return r.full(); }))) {
      p.places = {TESSERA_INT32, 2, {count - 1, 4}, {4, 1}};
      call.places = constant(packing.places);
    }
  }
  if (!placed()) {
    p.causal = any_causal;
    if (!any_causal) p.window_left = rows.window_left, p.window_right = rows.window_right;
    return p;
  }
  p.causal = problem_.causal;
  p.window_left = problem_.window_left, p.window_right = problem_.window_right;
  p.dropout_p = options.dropout_p;
  p.dropout_seed = options.dropout_seed, p.dropout_offset = options.dropout_offset;
  if (!planned.packed()) {
    p.first_q = rows.q_begin, p.first_k = rows.k_begin;
    p.total_q = p.total_k = problem_.lengths[rows.sequence];
    p.first_sequence = rows.sequence;
  }
  p.first_head = schedule_.heads_q.first;
  p.total_heads = problem_.heads_q, p.total_heads_kv = problem_.heads_kv;
  p.program = options.program;
  std::copy(std::begin(options.captured), std::end(options.captured), p.captured);
  for (int n = 0; n < TESSERA_MAX_CAPTURED_TENSORS && direction == TESSERA_BACKWARD; ++n) {
    p.d_captured[n] = d_captured_layout(options, n);
  }
  if (options.bias.rank != 0) p.bias = part_of(options.bias, rows, Base::kBias, call.bias);
  if (options.mask.rank != 0) p.mask = part_of(options.mask, rows, Base::kMask, call.mask);
  if (options.alibi != 0) {
    const int64_t heads = schedule_.heads_q.count;
    if (options.alibi == 1) {
      p.alibi_slopes = {TESSERA_FLOAT32, 1, {heads}, {1}};
    } else {
      p.alibi_slopes = {TESSERA_FLOAT32, 2, {batch_, heads}, {problem_.heads_q, 1}};
    }
    call.slopes = of_heads(Base::kSlopes);
  }
  return p;
}

// ---- messages -------------------------------------------------------------------------------------------------------

std::vector<Message> Pass::messages_of(const tessera_rank_step& step) const {
  std::vector<Message> messages;
  for (int64_t n = 0; n < step.num_transfers; ++n) {
    const tessera_rank_transfer& t = schedule_.schedule.transfers[static_cast<size_t>(step.first_transfer + n)];
    const auto same = [&t](const Message& m) {
      return m.receive == (t.receive != 0) && m.peer == t.peer && m.travels == t.travels &&
             m.partial == (t.partial != 0) && m.first_head == t.first_head && m.num_heads == t.num_heads;
    };
    auto found = std::find_if(messages.begin(), messages.end(), same);
    if (found == messages.end()) {
      messages.push_back({t.receive != 0,
                          t.peer,
                          static_cast<tessera_travels>(t.travels),
                          t.partial != 0,
                          t.first_head,
                          t.num_heads,
                          {}});
      found = std::prev(messages.end());
    }
    found->chunks.push_back(t.chunk);
  }
  for (Message& message : messages) std::sort(message.chunks.begin(), message.chunks.end());
  return messages;
}

void Pass::add_rows(const Message& message, const Block& block, const Slab& slab) {
  for (const int64_t number : message.chunks) {
    const int64_t bytes = block.chunk(number).length * slab.row_stride() * slab.element_bytes();
    for (int64_t b = 0; b < batch_ && bytes > 0; ++b) {
      pieces_.push_back({message.receive, message.peer, slab.ref(block.row(number), 0, b), bytes});
    }
  }
}

Slab Pass::stage(const Message& message, int32_t dtype, int64_t columns, bool statistics) {
  const Block block(schedule_.chunks, message.chunks);
  const Slab slab = statistics ? make_statistics(block.rows(), message.num_heads)
                               : make(dtype, block.rows(), message.num_heads, columns);
  if (!message.receive) release_at_end_of_step(slab);
  return slab;
}

// ---- steps ----------------------------------------------------------------------------------------------------------

std::vector<Pass::KeyRows> Pass::rectangles_of(const std::vector<tessera_rank_pair>& pairs,
                                               const std::vector<Block>& fetched) const {
  std::vector<Block> blocks{own_};
  blocks.insert(blocks.end(), fetched.begin(), fetched.end());
  const auto block_of = [&blocks](const tessera_rank_pair& pair) {
    return std::find_if(blocks.begin(), blocks.end(),
                        [&](const Block& b) { return b.has(pair.k_chunk, pair.k_chunks); });
  };
  if (!std::all_of(pairs.begin(), pairs.end(), [&](const auto& pair) { return block_of(pair) != blocks.end(); })) {
    std::vector<int64_t> needed;  // the keys of several ranks in one call
    for (const Block& block : blocks) {
      std::copy_if(block.numbers().begin(), block.numbers().end(), std::back_inserter(needed),
                   [&pairs](int64_t number) {
                     return std::any_of(pairs.begin(), pairs.end(), [number](const tessera_rank_pair& pair) {
                       return number >= pair.k_chunk && number < pair.k_chunk + pair.k_chunks;
                     });
                   });
    }
    blocks.assign(1, Block(schedule_.chunks, needed));
  }
  std::vector<KeyRows> result;
  for (auto block = blocks.begin(); block != blocks.end(); ++block) {
    std::vector<Rectangle> rectangles;
    for (tessera_rank_pair pair : pairs) {
      if (block_of(pair) != block) continue;
      const int64_t before = pair.k_begin % kDropoutKeys;  // keys that the mask hides
      if (placed() && block->chunk(pair.k_chunk).begin <= pair.k_begin - before) {
        pair.k_begin -= before, pair.k_length += before;
      }
      rectangles.push_back({pair.sequence, own_.row(pair.q_chunk, pair.q_begin), pair.q_length,
                            block->row(pair.k_chunk, pair.k_begin), pair.k_length, pair.window_left, pair.window_right,
                            pair.q_begin, pair.k_begin});
    }
    if (rectangles.empty()) continue;
    result.push_back({block->numbers(), placed() ? sorted(rectangles) : joined(rectangles)});
  }
  return result;
}

tessera_status Pass::plan_steps() {
  const Schedule& schedule = schedule_.schedule;
  std::map<int64_t, size_t> last_use;  // by chunk
  std::vector<std::vector<tessera_rank_pair>> pairs;
  for (size_t n = 0; n < schedule.steps.size(); ++n) {
    const auto begin = schedule.pairs.begin() + schedule.steps[n].first_pair;
    pairs.emplace_back(begin, begin + schedule.steps[n].num_pairs);
    for (const tessera_rank_pair& pair : pairs.back()) {
      for (int64_t c = pair.k_chunk; c < pair.k_chunk + pair.k_chunks; ++c) last_use[c] = n;
    }
  }
  std::vector<Block> fetched;
  std::vector<std::vector<KeyRows>> of_steps;
  Layers rows;
  for (size_t n = 0; n < schedule.steps.size(); ++n) {
    PlannedStep& step = steps_.emplace_back();
    of_steps.push_back(rectangles_of(pairs[n], fetched));
    for (const KeyRows& of_keys : of_steps.back()) {
      for (const Rectangle& r : of_keys.rectangles) rows.place({r.q_row, r.q_end()});
    }
    for (const Message& message : messages_of(schedule.steps[n])) {
      if (message.receive && message.travels == TESSERA_TRAVELS_KV && !in_group(message.peer)) {
        fetched.emplace_back(schedule_.chunks, message.chunks);
      }
    }
    std::erase_if(fetched, [&](const Block& block) {
      return std::none_of(block.numbers().begin(), block.numbers().end(), [&](int64_t number) {
        const auto last = last_use.find(number);
        return last != last_use.end() && last->second > n;
      });
    });
    for (const Block& block : fetched) {
      step.kept.insert(step.kept.end(), block.numbers().begin(), block.numbers().end());
    }
  }
  depth_ = rows.count();
  plan_calls(of_steps);
  return ok();
}

void Pass::plan_calls(const std::vector<std::vector<KeyRows>>& of_steps) {
  // Where each row has one call, later calls may not write it again.
  std::vector<Range> written;
  std::vector<Range>* const keeps = depth_ <= 1 ? &written : nullptr;
  Layers rows;
  for (size_t n = 0; n < of_steps.size(); ++n) {
    for (const auto& [keys, rectangles] : of_steps[n]) {
      if (!packs()) {
        for (const Rectangle& r : rectangles) steps_[n].calls.push_back({r, {}, keys});
        continue;
      }
      for (const std::vector<Rectangle>& group : grouped(rectangles, placed(), keeps)) {
        PlannedCall call{group.front(), {}, keys};
        if (group.size() > 1) {
          call.sequences = group;
          call.rows.q_length = group.back().q_end() - call.rows.q_row;
          call.rows.k_length = group.back().k_end() - call.rows.k_row;
        }
        steps_[n].calls.push_back(call);
      }
    }
    for (const PlannedCall& call : steps_[n].calls) rows.place({call.rows.q_row, call.rows.q_end()});
  }
  if (!keeps) depth_ = rows.count();
}

void Pass::finish_program() {
  program_.constants_at = arena_.bytes();
  program_.workspace_bytes = arena_.bytes() + static_cast<int64_t>(program_.constants.size() * sizeof(int32_t));
}

tessera_status Pass::walk_steps() {
  const std::vector<tessera_rank_step>& steps = schedule_.schedule.steps;
  for (size_t n = 0; n < steps.size(); ++n) {
    const std::vector<Message> messages = messages_of(steps[n]);
    for (const Message& message : messages) prepare(message);
    if (!messages.empty()) {
      program_.operations.emplace_back(Send{static_cast<int32_t>(n) + 1, std::exchange(pieces_, {})});
    }
    if (!steps_[n].calls.empty()) TESSERA_RETURN_IF_ERROR(compute(n, steps_[n].calls));
    if (messages.empty()) continue;
    program_.operations.emplace_back(Wait{static_cast<int32_t>(n) + 1, static_cast<int32_t>(steps.size())});
    for (const Message& message : messages) {
      if (message.receive) deliver(message);
    }
    for (const Slab& slab : std::exchange(of_step_, {})) release(slab);
    staged_.clear();
    const std::vector<int64_t>& kept = steps_[n].kept;
    std::erase_if(fetched_, [&](const KeyBlock& block) {
      const auto needed = [&](int64_t number) { return std::find(kept.begin(), kept.end(), number) != kept.end(); };
      if (std::all_of(block.block.numbers().begin(), block.block.numbers().end(), needed)) return false;
      release(block.k), release(block.v);
      return true;
    });
  }
  return ok();
}

KeyBlock& Pass::key_block(const std::vector<int64_t>& numbers) {
  if (keys_.block.numbers() == numbers) return keys_;
  for (KeyBlock& block : fetched_) {
    if (block.block.numbers() == numbers) return block;
  }
  KeyBlock merged{Block(schedule_.chunks, numbers), {}, {}, {}, {}};
  merged.k = make(problem_.dtype, merged.block.rows(), keys_.k.heads, problem_.head_dim);
  merged.v = make(problem_.dtype, merged.block.rows(), keys_.v.heads, problem_.head_dim_v);
  const auto add = [&](const KeyBlock& part) {
    std::vector<int64_t> both;
    std::copy_if(numbers.begin(), numbers.end(), std::back_inserter(both),
                 [&part](int64_t number) { return part.block.has(number); });
    move_chunks(both, part.block, part.k, 0, merged.block, merged.k, 0, merged.k.heads);
    move_chunks(both, part.block, part.v, 0, merged.block, merged.v, 0, merged.v.heads);
  };
  add(keys_);
  for (const KeyBlock& block : fetched_) add(block);
  fetched_.push_back(std::move(merged));
  return fetched_.back();
}

void Pass::receive_keys(const Message& message) {
  KeyBlock block{Block(schedule_.chunks, message.chunks), {}, {}, {}, {}};
  block.k = make(problem_.dtype, block.block.rows(), message.num_heads, problem_.head_dim);
  block.v = make(problem_.dtype, block.block.rows(), message.num_heads, problem_.head_dim_v);
  add_rows(message, block.block, block.k);
  add_rows(message, block.block, block.v);
  // Calls of this step cannot have its keys: they are added to the blocks when they have arrived.
  keep_staged(message, block.k);
  keep_staged(message, block.v);
}

}  // namespace tessera::distributed
