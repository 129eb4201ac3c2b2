// Executes a program's list.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <iterator>

#include "distributed/program.hpp"

namespace tessera::distributed {
namespace {

template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};

core::Rows rows_at(const Memory& memory, const RowsRef& rows) {
  return {memory.at(rows.at), rows.dtype, rows.batch, rows.row, rows.head};
}

tessera_status call_at(const Program& program, const Memory& memory, const Call& call,
                       const tessera_executor& executor) {
  const tessera_plan& plan = program.plans[call.plan];
  tessera_buffers buffers{};
  buffers.struct_size = sizeof buffers;
  const auto floats = [&](const Ref& ref) { return reinterpret_cast<float*>(memory.at(ref)); };
  buffers.q = memory.at(call.q), buffers.k = memory.at(call.k), buffers.v = memory.at(call.v);
  buffers.o = memory.at(call.o), buffers.lse = floats(call.lse), buffers.lse_low = floats(call.lse_low);
  const auto integers = [&](const Ref& ref) { return reinterpret_cast<int32_t*>(memory.at(ref)); };
  buffers.cu_seqlens_q = integers(call.cu_q), buffers.cu_seqlens_k = integers(call.cu_k);
  buffers.places = integers(call.places);
  buffers.alibi_slopes = floats(call.slopes), buffers.sink = floats(call.sink), buffers.d_sink = floats(call.d_sink);
  std::copy(std::begin(memory.captured), std::end(memory.captured), buffers.captured);
  std::copy(std::begin(memory.scalars), std::end(memory.scalars), buffers.scalars);
  buffers.d_o = memory.at(call.d_o);
  buffers.o_accum = floats(call.o_accum);
  buffers.bias = memory.at(call.bias), buffers.mask = reinterpret_cast<const uint8_t*>(memory.at(call.mask));
  buffers.d_bias = floats(call.d_bias);
  for (int n = 0; n < TESSERA_MAX_CAPTURED_TENSORS; ++n) buffers.d_captured[n] = memory.at(call.d_captured[n]);
  buffers.d_q = memory.at(call.d_q), buffers.d_k = memory.at(call.d_k), buffers.d_v = memory.at(call.d_v);
  const auto run = plan.problem.direction == TESSERA_BACKWARD ? tessera_backward : tessera_forward;
  return run(&plan, &buffers, memory.at(call.workspace), static_cast<size_t>(plan.workspace_bytes), &executor);
}

tessera_status merge_at(const Memory& memory, const Merge& given, const tessera_device& device,
                        const tessera_executor& executor) {
  tessera_combine_call call = given.merge;
  call.o_parts.data = memory.at(given.o_parts);
  call.lse_parts.data = memory.at(given.lse_parts), call.lse_low_parts.data = memory.at(given.lse_low_parts);
  call.o.data = memory.at(given.o), call.lse.data = memory.at(given.lse), call.lse_low.data = memory.at(given.lse_low);
  return tessera_combine(&call, &device, &executor);
}

}  // namespace

tessera_status walk(const Program& program, uint64_t number, const Memory& given, core::RowMoves& moves,
                    core::Transport& transport, const tessera_device& device, const tessera_executor& executor,
                    core::Cancel& cancel) {
  void* const stream = executor.stream;
  Memory memory = given;
  char* const constants = memory.at({Base::kWorkspace, program.constants_at});
  memory.base[static_cast<size_t>(Base::kConstants)] = constants;
  const auto execute = Overloaded{
      [&](const Fill& fill) {
        return moves.fill(reinterpret_cast<float*>(memory.at(fill.at)), fill.value, fill.count, stream);
      },
      [&](const Move& move) {
        return moves.move(move.shape, rows_at(memory, move.from), rows_at(memory, move.to), move.add, stream);
      },
      [&](const Call& call) { return call_at(program, memory, call, executor); },
      [&](const Merge& merge) { return merge_at(memory, merge, device, executor); },
      [&](const Send& send) -> tessera_status {
        // Of this step of this call: a rank may have no messages in a step.
        const uint64_t exchange = (number + static_cast<uint64_t>(send.step)) * 6364136223846793005u;
        TESSERA_RETURN_IF_ERROR(transport.begin(exchange, stream));
        for (const Piece& piece : send.pieces) {
          const auto bytes = static_cast<size_t>(piece.bytes);
          TESSERA_RETURN_IF_ERROR(piece.receive ? transport.receive(memory.at(piece.at), bytes, piece.peer)
                                                : transport.send(memory.at(piece.at), bytes, piece.peer));
        }
        return transport.start();
      },
      [&](const Wait& wait) -> tessera_status {
        const tessera_status status = transport.wait(stream, cancel);
        if (status.code != TESSERA_INTERNAL) return status;
        return internal("rank %d, step %d of %d: %.400s", transport.rank(), wait.step, wait.steps, status.message);
      },
  };
  const std::vector<int32_t>& values = program.constants;
  if (!values.empty()) {
    TESSERA_RETURN_IF_ERROR(
        moves.write(values.data(), static_cast<int64_t>(values.size()), reinterpret_cast<int32_t*>(constants), stream));
  }
  for (const Operation& operation : program.operations) {
    if (cancel.asked()) return cancelled();
    TESSERA_RETURN_IF_ERROR(std::visit(execute, operation));
  }
  return ok();
}

}  // namespace tessera::distributed
