#include "core/caller_struct.hpp"

#include "core/fields.hpp"

namespace tessera::core {
namespace {

// Neither struct may have tail padding: an older caller's padding bytes would be read as a newer member.
static_assert(sizeof(tessera_problem) == offsetof(tessera_problem, list_capacity) + sizeof(int64_t) &&
                  offsetof(tessera_problem, list_capacity) == fields_end().problem,
              "a last member other than a tensor's is named here");
static_assert(sizeof(tessera_buffers) == fields_end().buffers);
static_assert(sizeof(tessera_combine_call) == offsetof(tessera_combine_call, lse_low) + sizeof(tessera_tensor));
static_assert(sizeof(tessera_executor) == offsetof(tessera_executor, cancel_context) + sizeof(void*));

}  // namespace

// The oldest accepted sizes are those of 0.1.0 without the members that have defaults: a problem's options, the
// pointers of the backward pass, the low floats of a merge's LSEs, and cancellation.
tessera_status read_problem(const tessera_problem* given, tessera_problem& known) {
  if (!given) return invalid("problem: NULL, must point to a tessera_problem");
  tessera_problem_init(&known);
  return read_struct("problem", *given, offsetof(tessera_problem, scale), "tessera_problem_init", known);
}

tessera_status read_buffers(const tessera_buffers* given, tessera_buffers& known) {
  if (!given) return invalid("buffers: NULL, must point to a tessera_buffers");
  known = {};
  return read_struct("buffers", *given, offsetof(tessera_buffers, d_o), "{.struct_size = sizeof(tessera_buffers)}",
                     known);
}

tessera_status read_combine_call(const tessera_combine_call* given, tessera_combine_call& known) {
  if (!given) return invalid("call: NULL, must point to a tessera_combine_call");
  known = {};
  return read_struct("call", *given, offsetof(tessera_combine_call, lse_low_parts),
                     "{.struct_size = sizeof(tessera_combine_call)}", known);
}

tessera_status read_executor(const tessera_executor* given, tessera_executor& known) {
  known = {};
  if (!given) return ok();
  return read_struct("executor", *given, offsetof(tessera_executor, cancel),
                     "{.struct_size = sizeof(tessera_executor)}", known);
}

}  // namespace tessera::core
