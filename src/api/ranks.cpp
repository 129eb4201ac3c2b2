// The C interface of attention on ranks: communicators, prepared attentions, and their passes.
#include "cuda/ranks.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "api/device_here.hpp"
#include "core/caller_struct.hpp"
#include "core/cancel.hpp"
#include "core/guarded.hpp"
#include "core/own_memory.hpp"
#include "core/status.hpp"
#include "cpu/rows.hpp"
#include "cuda/cuda.hpp"
#include "distributed/layout.hpp"
#include "distributed/program.hpp"
#include "distributed/threads.hpp"
#include "tessera/distributed.h"

using namespace tessera;

struct tessera_communicator {
  std::unique_ptr<core::Transport> transport;
  std::unique_ptr<core::RowMoves> moves;
  std::set<uint64_t> agreed;  // calls that all ranks have made together
  std::mutex in_use;          // while a call uses it
};

struct tessera_ranks_attention {
  std::vector<int64_t> lengths;
  distributed::Setting setting{};
  distributed::Program forward, backward;  // the problem's lengths are `lengths`
  int64_t saved_bytes = 0;
  uint64_t hash = 0;  // of everything in which ranks must agree
};

namespace {

static_assert(sizeof(tessera_ranks_options) ==
              offsetof(tessera_ranks_options, grad_bias) + sizeof(tessera_ranks_options::grad_bias));
static_assert(sizeof(tessera_ranks_buffers) ==
              offsetof(tessera_ranks_buffers, d_bias) + sizeof(tessera_ranks_buffers::d_bias));

constexpr int64_t kAlignment = distributed::Arena::kAlignment;
constexpr uintptr_t kSavedAlignment = 64;
constexpr int64_t kDropoutRows = 32;

tessera_status read_options(const tessera_ranks_options* given, tessera_ranks_options& options) {
  options = {};
  if (!given) return ok();
  TESSERA_RETURN_IF_ERROR(core::read_struct("options", *given, offsetof(tessera_ranks_options, program),
                                            "{.struct_size = sizeof(tessera_ranks_options)}", options));
  if (options.alibi < 0 || options.alibi > 2) return invalid("alibi: %d, accepted 0 .. 2", options.alibi);
  if (options.sink < 0 || options.sink > 1) return invalid("sink: %d, accepted 0 or 1", options.sink);
  for (int n = 0; n < TESSERA_MAX_CAPTURED_TENSORS && !options.program; ++n) {
    if (!core::present(options.captured[n])) continue;
    return invalid("captured[%d]: given without program, whose tensor it is", n);
  }
  if (options.grad_bias > 1) return invalid("grad_bias: %" PRIu64 ", accepted 0 or 1", options.grad_bias);
  if (options.grad_bias && !core::present(options.bias)) {
    return invalid("grad_bias: 1 without bias, accepted only with it");
  }
  for (int n = 0; n < 64; ++n) {
    if ((options.grad_captured >> n & 1) == 0) continue;
    if (n < TESSERA_MAX_CAPTURED_TENSORS && core::present(options.captured[n])) continue;
    return invalid("grad_captured: bit %d is set, accepted bits of captured tensors that are given", n);
  }
  return ok();
}

// ---- preparation ----------------------------------------------------------------------------------------------------

// The ranks that divide the heads: the same for both passes, since backward uses what forward has exchanged. Left open,
// they are the number with the shortest predicted time of both.
tessera_status choose_head_ranks(tessera_ranks_problem& problem) {
  tessera_ranks_plan plans[2];
  for (const int32_t direction : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
    problem.direction = direction;
    TESSERA_RETURN_IF_ERROR(tessera_make_ranks_plan(&problem, &plans[direction]));
  }
  const auto time = [&](int32_t direction, int32_t head_ranks) {
    double best = -1;
    for (int32_t n = 0; n < plans[direction].num_answers; ++n) {
      const tessera_ranks_answer& answer = plans[direction].answers[n];
      if (!answer.accepted || answer.head_ranks != head_ranks) continue;
      if (problem.strategy != TESSERA_STRATEGY_AUTO && answer.strategy != problem.strategy) continue;
      if (best < 0 || answer.predicted_us < best) best = answer.predicted_us;
    }
    return best;
  };
  double best = -1;
  int32_t chosen = 0;
  for (int32_t n = 0; n < plans[TESSERA_FORWARD].num_answers; ++n) {
    const int32_t head_ranks = plans[TESSERA_FORWARD].answers[n].head_ranks;
    if (problem.head_ranks != 0 && head_ranks != problem.head_ranks) continue;
    const double forward = time(TESSERA_FORWARD, head_ranks), backward = time(TESSERA_BACKWARD, head_ranks);
    if (forward < 0 || backward < 0 || (best >= 0 && forward + backward >= best)) continue;
    best = forward + backward, chosen = head_ranks;
  }
  problem.head_ranks = chosen;
  return ok();
}

tessera_status check_dropout(const tessera_ranks_plan& plan) {
  for (const tessera_chunk& chunk : distributed::make_chunks(plan.problem)) {
    if (chunk.begin % kDropoutRows == 0) continue;
    return invalid("dropout_p: with a chunk that begins at row %" PRId64
                   " of its sequence, accepted lengths whose chunks are multiples of %" PRId64 " rows",
                   chunk.begin, kDropoutRows);
  }
  return ok();
}

tessera_status check_entries(const char* name, const tessera_layout& layout, const tessera_ranks_problem& p) {
  if (!core::present(layout)) return ok();
  const int64_t longest = p.num_sequences > 0 ? *std::max_element(p.lengths, p.lengths + p.num_sequences) : 0;
  const int64_t whole[] = {p.num_sequences > 1 ? p.num_sequences : p.batch, p.heads_q, longest, longest};
  bool fits = layout.rank == 4 && layout.shape[3] == longest;
  for (int axis = 0; axis < 3 && fits; ++axis) fits = layout.shape[axis] == 1 || layout.shape[axis] == whole[axis];
  if (fits) return ok();
  return invalid("%s: rank %d, shape [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "], accepted rank 4, [%" PRId64
                 "|1, %" PRId64 "|1, %" PRId64 "|1, %" PRId64 "]",
                 name, layout.rank, layout.shape[0], layout.shape[1], layout.shape[2], layout.shape[3], whole[0],
                 whole[1], whole[2], whole[3]);
}

uint64_t hash_of(uint64_t plans, tessera_ranks_options options) {
  uint64_t hash = plans ^ tessera_program_hash(options.program);
  options.program = nullptr;  // an address, of each rank, as strides are each rank's own
  for (tessera_layout& captured : options.captured) std::fill_n(captured.strides, TESSERA_MAX_RANK, 0);
  for (tessera_layout* entries : {&options.bias, &options.mask}) std::fill_n(entries->strides, TESSERA_MAX_RANK, 0);
  const auto* const bytes = reinterpret_cast<const unsigned char*>(&options);
  for (size_t n = sizeof options.struct_size; n < sizeof options; ++n) hash = (hash ^ bytes[n]) * 1099511628211u;
  return hash;
}

tessera_status create(const tessera_ranks_problem* problem, const tessera_ranks_options* options,
                      const tessera_device* device, int32_t rank, tessera_ranks_attention& attention) {
  if (!problem) return invalid("problem: NULL, must point to a tessera_ranks_problem");
  tessera_ranks_plan plan;
  TESSERA_RETURN_IF_ERROR(tessera_make_ranks_plan(problem, &plan));
  tessera_ranks_problem known = plan.problem;
  // The choice of the plan for one direction is undone: the other one has a say.
  known.strategy = problem->strategy, known.head_ranks = problem->head_ranks;
  if (rank < 0 || rank >= known.ranks) return invalid("rank: %d, accepted 0 .. %d", rank, known.ranks - 1);
  attention.lengths.assign(known.lengths, known.lengths + known.num_sequences);
  known.lengths = attention.lengths.data();
  distributed::Setting& setting = attention.setting;
  TESSERA_RETURN_IF_ERROR(read_options(options, setting.options));
  TESSERA_RETURN_IF_ERROR(check_entries("bias", setting.options.bias, known));
  TESSERA_RETURN_IF_ERROR(check_entries("mask", setting.options.mask, known));
  TESSERA_RETURN_IF_ERROR(api::device_here(device, setting.device));
  setting.rank = rank;
  setting.saves = known.direction == TESSERA_BACKWARD;
  if (setting.saves) TESSERA_RETURN_IF_ERROR(choose_head_ranks(known));
  known.direction = TESSERA_FORWARD;
  TESSERA_RETURN_IF_ERROR(tessera_make_ranks_plan(&known, &plan));
  if (setting.options.dropout_p > 0) TESSERA_RETURN_IF_ERROR(check_dropout(plan));
  TESSERA_RETURN_IF_ERROR(distributed::make_forward(plan, setting, attention.forward, attention.saved_bytes));
  attention.hash = hash_of(plan.hash, setting.options);
  if (setting.saves) {
    known.direction = TESSERA_BACKWARD;
    TESSERA_RETURN_IF_ERROR(tessera_make_ranks_plan(&known, &plan));
    TESSERA_RETURN_IF_ERROR(distributed::make_backward(plan, setting, attention.backward));
    attention.hash = hash_of(attention.hash ^ plan.hash, setting.options);
  }
  setting.options.program = nullptr;  // the plans have what they need of it
  return ok();
}

// ---- a pass ---------------------------------------------------------------------------------------------------------

const distributed::Program* program_of(const tessera_ranks_attention* attention, int32_t direction) {
  if (!attention || direction < TESSERA_FORWARD || direction > TESSERA_BACKWARD) return nullptr;
  if (direction == TESSERA_FORWARD) return &attention->forward;
  return attention->setting.saves ? &attention->backward : nullptr;
}

// A call of one rank.
struct RankCall {
  const tessera_ranks_attention* attention;
  int32_t direction;
  tessera_communicator& communicator;
  const tessera_ranks_buffers* buffers;
  void* workspace;
  size_t workspace_bytes;
  const tessera_executor* executor;
  bool all_learn = false;  // all ranks get an error by themselves
};

// Compares the ranks' calls, by their hashes, at the first call of a problem and direction.
tessera_status agree(RankCall& call, uint64_t hash, void* stream, core::Cancel& cancel) {
  core::Transport& transport = *call.communicator.transport;
  std::set<uint64_t>& agreed = call.communicator.agreed;
  if (transport.ranks() == 1 || agreed.contains(hash) || transport.capturing(stream)) return ok();
  std::vector<uint64_t> all(static_cast<size_t>(transport.ranks()));
  TESSERA_RETURN_IF_ERROR(transport.all_gather(hash, all.data(), stream, cancel));
  std::string others;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] != hash) others += (others.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (others.empty()) {
    agreed.insert(hash);
    return ok();
  }
  call.all_learn = true;
  return invalid(
      "attention: rank %d has another problem than rank%s %.200s, accepted the same lengths, heads, dtype, masks, "
      "layout, strategy, options and direction of the call on all",
      transport.rank(), others.find(',') == std::string::npos ? "" : "s", others.c_str());
}

tessera_status check_buffers(const tessera_ranks_attention& attention, const tessera_ranks_buffers& buffers,
                             const void* workspace, size_t workspace_bytes, bool backward) {
  const tessera_ranks_problem& p = attention.forward.plan.problem;
  const tessera_device& device = attention.setting.device;
  const int32_t alibi = attention.setting.options.alibi;
  const int64_t rows = attention.forward.plan.rows_per_rank;
  const auto tensor = [&p](std::initializer_list<int64_t> shape, int32_t dtype) {
    tessera_layout layout{dtype, static_cast<int32_t>(shape.size()), {}, {}};
    std::copy(shape.begin(), shape.end(), layout.shape);
    int64_t stride = 1;
    for (int32_t dim = layout.rank - 1; dim >= 0; stride *= layout.shape[dim--]) layout.strides[dim] = stride;
    return layout;
  };
  const auto rows_of = [&](int64_t heads, int64_t columns) { return tensor({p.batch, rows, heads, columns}, p.dtype); };
  const auto bytes = [&tensor](size_t count) { return tensor({static_cast<int64_t>(count)}, TESSERA_BOOL); };
  const tessera_layout q = rows_of(p.heads_q, p.head_dim), o = rows_of(p.heads_q, p.head_dim_v);
  const tessera_layout k = rows_of(p.heads_kv, p.head_dim), v = rows_of(p.heads_kv, p.head_dim_v);
  const tessera_layout lse = tensor({p.batch, p.heads_q, rows}, TESSERA_FLOAT32);
  const tessera_layout slopes = alibi == 2 ? tensor({p.batch, p.heads_q}, TESSERA_FLOAT32)
                                           : tensor({alibi == 1 ? p.heads_q : 0}, TESSERA_FLOAT32);
  const tessera_layout sink = tensor({attention.setting.options.sink ? p.heads_q : 0}, TESSERA_FLOAT32);
  const tessera_layout saved = bytes(tessera_ranks_saved_bytes(&attention)), scratch = bytes(workspace_bytes);
  const struct {
    const char* name;
    const tessera_layout* layout;
    const void* pointer;
    bool needed, written;
  } all[] = {{"q", &q, buffers.q, true, false},
             {"k", &k, buffers.k, true, false},
             {"v", &v, buffers.v, true, false},
             {"o", &o, buffers.o, true, !backward},
             {"lse", &lse, buffers.lse, true, !backward},
             {"alibi_slopes", &slopes, buffers.alibi_slopes, true, false},
             {"saved", &saved, buffers.saved, true, !backward},
             {"sink", &sink, buffers.sink, true, false},
             {"d_o", &o, buffers.d_o, backward, false},
             {"d_q", &q, buffers.d_q, backward, true},
             {"d_k", &k, buffers.d_k, backward, true},
             {"d_v", &v, buffers.d_v, backward, true},
             {"d_sink", &sink, buffers.d_sink, backward, true},
             {"workspace", &scratch, workspace, true, true}};
  core::OwnMemory memory;
  const auto check = [&](const char* name, const tessera_layout& layout, const void* pointer, bool written) {
    if (!core::present(layout) || core::elements(layout) == 0) return ok();
    TESSERA_RETURN_IF_ERROR(core::check_pointer(name, layout, pointer));
    if (device.backend == TESSERA_BACKEND_CUDA) TESSERA_RETURN_IF_ERROR(cuda::check_memory(name, pointer, device));
    memory.add(name, layout, pointer, written);
    return ok();
  };
  for (const auto& buffer : all) {
    if (buffer.needed) {
      TESSERA_RETURN_IF_ERROR(check(buffer.name, *buffer.layout, buffer.pointer, buffer.written));
    }
  }
  static_assert(TESSERA_MAX_CAPTURED_TENSORS == 8);
  constexpr const char* kCaptured[] = {"captured[0]", "captured[1]", "captured[2]", "captured[3]",
                                       "captured[4]", "captured[5]", "captured[6]", "captured[7]"};
  constexpr const char* kDCaptured[] = {"d_captured[0]", "d_captured[1]", "d_captured[2]", "d_captured[3]",
                                        "d_captured[4]", "d_captured[5]", "d_captured[6]", "d_captured[7]"};
  const tessera_ranks_options& options = attention.setting.options;
  const tessera_layout d_bias = distributed::d_bias_layout(options);
  TESSERA_RETURN_IF_ERROR(check("bias", options.bias, buffers.bias, false));
  TESSERA_RETURN_IF_ERROR(check("mask", options.mask, buffers.mask, false));
  if (backward) TESSERA_RETURN_IF_ERROR(check("d_bias", d_bias, buffers.d_bias, true));
  tessera_layout gradients[TESSERA_MAX_CAPTURED_TENSORS] = {};
  for (int n = 0; n < TESSERA_MAX_CAPTURED_TENSORS; ++n) {
    if (rows > 0) TESSERA_RETURN_IF_ERROR(check(kCaptured[n], options.captured[n], buffers.captured[n], false));
    if (backward) {
      gradients[n] = distributed::d_captured_layout(options, n);
      TESSERA_RETURN_IF_ERROR(check(kDCaptured[n], gradients[n], buffers.d_captured[n], true));
    }
  }
  if (attention.saved_bytes > 0 && reinterpret_cast<uintptr_t>(buffers.saved) % kSavedAlignment != 0) {
    return invalid("saved: %p, must be aligned to %d bytes", buffers.saved, static_cast<int>(kSavedAlignment));
  }
  return memory.check();
}

distributed::Memory memory_of(const tessera_ranks_buffers& buffers, void* workspace) {
  using distributed::Base;
  distributed::Memory memory;
  const auto set = [&memory](Base base, const void* pointer) {
    memory.base[static_cast<size_t>(base)] = static_cast<char*>(const_cast<void*>(pointer));
  };
  set(Base::kQ, buffers.q), set(Base::kK, buffers.k), set(Base::kV, buffers.v);
  set(Base::kO, buffers.o), set(Base::kLse, buffers.lse), set(Base::kSlopes, buffers.alibi_slopes);
  set(Base::kDO, buffers.d_o);
  set(Base::kDQ, buffers.d_q), set(Base::kDK, buffers.d_k), set(Base::kDV, buffers.d_v);
  set(Base::kSink, buffers.sink), set(Base::kDSink, buffers.d_sink);
  set(Base::kBias, buffers.bias), set(Base::kMask, buffers.mask), set(Base::kDBias, buffers.d_bias);
  set(Base::kSaved, buffers.saved);
  for (int n = 0; n < TESSERA_MAX_CAPTURED_TENSORS; ++n) set(distributed::d_captured(n), buffers.d_captured[n]);
  std::copy(std::begin(buffers.captured), std::end(buffers.captured), memory.captured);
  std::copy(std::begin(buffers.scalars), std::end(buffers.scalars), memory.scalars);
  const uintptr_t misaligned = reinterpret_cast<uintptr_t>(workspace) % static_cast<uintptr_t>(kAlignment);
  set(Base::kWorkspace, static_cast<char*>(workspace) + (misaligned ? kAlignment - misaligned : 0));
  return memory;
}

tessera_status run(RankCall& call) {
  const tessera_ranks_attention* const attention = call.attention;
  if (!attention) return invalid("attention: NULL, accepted what tessera_ranks_attention_create made");
  if (!call.buffers) return invalid("buffers: NULL, must point to a tessera_ranks_buffers");
  const distributed::Program* const program = program_of(attention, call.direction);
  if (!program) return invalid("attention: prepared for the forward pass, accepted one of direction backward");
  tessera_ranks_buffers buffers{};
  TESSERA_RETURN_IF_ERROR(core::read_struct("buffers", *call.buffers, offsetof(tessera_ranks_buffers, sink),
                                            "{.struct_size = sizeof(tessera_ranks_buffers)}", buffers));
  tessera_executor executor;
  TESSERA_RETURN_IF_ERROR(core::read_executor(call.executor, executor));
  executor.struct_size = sizeof executor;
  core::Transport& transport = *call.communicator.transport;
  const tessera_ranks_problem& problem = program->plan.problem;
  if (transport.rank() != attention->setting.rank || transport.ranks() != problem.ranks) {
    return invalid("communicator: rank %d of %d, accepted that of the attention, rank %d of %d", transport.rank(),
                   transport.ranks(), attention->setting.rank, problem.ranks);
  }
  const tessera_device& device = attention->setting.device;
  TESSERA_RETURN_IF_ERROR(transport.check(device));
  const size_t needed = tessera_ranks_workspace_bytes(attention, call.direction);
  if (call.workspace_bytes < needed) {
    return invalid("workspace_bytes: %zu, accepted at least %zu", call.workspace_bytes, needed);
  }
  const bool backward = call.direction == TESSERA_BACKWARD;
  TESSERA_RETURN_IF_ERROR(check_buffers(*attention, buffers, call.workspace, needed, backward));
  const uint64_t hash = attention->hash * 2 + (backward ? 1 : 0);
  core::Cancel cancel(device.backend == TESSERA_BACKEND_CPU ? executor : tessera_executor{});
  TESSERA_RETURN_IF_ERROR(agree(call, hash, executor.stream, cancel));
  return distributed::walk(*program, hash, memory_of(buffers, call.workspace), *call.communicator.moves, transport,
                           device, executor, cancel);
}

// However a call of a rank ends without success, the other ranks learn it.
tessera_status pass(const char* function, int32_t direction, const tessera_ranks_attention* attention,
                    tessera_communicator* communicator, const tessera_ranks_buffers* buffers, void* workspace,
                    size_t workspace_bytes, const tessera_executor* executor) {
  if (!communicator) return invalid("communicator: NULL, accepted this rank's");
  core::Transport& transport = *communicator->transport;
  RankCall call{attention, direction, *communicator, buffers, workspace, workspace_bytes, executor};
  tessera_status status;
  const std::unique_lock in_use(communicator->in_use, std::try_to_lock);
  try {
    status = core::guarded(function, [&] {
      return in_use ? run(call) : invalid("communicator: another call uses it, accepted one call at a time");
    });
  } catch (...) {  // the thread itself ends
    transport.abandon("its thread was cancelled");
    throw;
  }
  if (status.code != TESSERA_OK && !call.all_learn) transport.abandon(status.message);
  return status;
}

}  // namespace

extern "C" {

tessera_status tessera_communicator_threads(int32_t ranks, tessera_communicator** communicators) {
  constexpr int32_t kMostRanks = 1024;
  if (ranks < 1 || ranks > kMostRanks) return invalid("ranks: %d, accepted 1 .. %d", ranks, kMostRanks);
  if (!communicators) return invalid("communicators: NULL, must point to %d pointers", ranks);
  return core::guarded("tessera_communicator_threads", [&] {
    std::vector<std::unique_ptr<tessera_communicator>> made;
    for (std::unique_ptr<core::Transport>& transport : distributed::make_thread_transports(ranks)) {
      made.push_back(std::make_unique<tessera_communicator>());
      made.back()->transport = std::move(transport);
      made.back()->moves = std::make_unique<cpu::HostRowMoves>();
    }
    for (int32_t rank = 0; rank < ranks; ++rank) communicators[rank] = made[static_cast<size_t>(rank)].release();
    return ok();
  });
}

tessera_status tessera_communicator_nccl(ncclComm* comm, tessera_communicator** communicator) {
  if (!comm) return invalid("comm: NULL, accepted an ncclComm_t");
  if (!communicator) return invalid("communicator: NULL, must point to a pointer");
  return core::guarded("tessera_communicator_nccl", [&]() -> tessera_status {
    auto made = std::make_unique<tessera_communicator>();
    tessera_device device;
    TESSERA_RETURN_IF_ERROR(cuda::make_nccl_transport(comm, made->transport, device));
    made->moves = cuda::make_row_moves(device);
    *communicator = made.release();
    return ok();
  });
}

void tessera_communicator_destroy(tessera_communicator* communicator) { delete communicator; }

tessera_status tessera_ranks_attention_create(const tessera_ranks_problem* problem,
                                              const tessera_ranks_options* options, const tessera_device* device,
                                              int32_t rank, tessera_ranks_attention** attention) {
  if (!attention) return invalid("attention: NULL, must point to a pointer");
  return core::guarded("tessera_ranks_attention_create", [&]() -> tessera_status {
    auto made = std::make_unique<tessera_ranks_attention>();
    TESSERA_RETURN_IF_ERROR(create(problem, options, device, rank, *made));
    *attention = made.release();
    return ok();
  });
}

void tessera_ranks_attention_destroy(tessera_ranks_attention* attention) { delete attention; }

const tessera_ranks_plan* tessera_ranks_attention_plan(const tessera_ranks_attention* attention, int32_t direction) {
  const distributed::Program* const program = program_of(attention, direction);
  return program ? &program->plan : nullptr;
}

size_t tessera_ranks_workspace_bytes(const tessera_ranks_attention* attention, int32_t direction) {
  const distributed::Program* const program = program_of(attention, direction);
  return program && program->workspace_bytes > 0 ? static_cast<size_t>(program->workspace_bytes + kAlignment) : 0;
}

size_t tessera_ranks_saved_bytes(const tessera_ranks_attention* attention) {
  return attention ? static_cast<size_t>(attention->saved_bytes) : 0;
}

tessera_status tessera_ranks_forward(const tessera_ranks_attention* attention, tessera_communicator* communicator,
                                     const tessera_ranks_buffers* buffers, void* workspace, size_t workspace_bytes,
                                     const tessera_executor* executor) {
  return pass("tessera_ranks_forward", TESSERA_FORWARD, attention, communicator, buffers, workspace, workspace_bytes,
              executor);
}

tessera_status tessera_ranks_backward(const tessera_ranks_attention* attention, tessera_communicator* communicator,
                                      const tessera_ranks_buffers* buffers, void* workspace, size_t workspace_bytes,
                                      const tessera_executor* executor) {
  return pass("tessera_ranks_backward", TESSERA_BACKWARD, attention, communicator, buffers, workspace, workspace_bytes,
              executor);
}

}  // extern "C"
