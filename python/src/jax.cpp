// For each platform one handler serves both directions of attention, and another appends to a cache. A call's
// attributes list its operands and results, by the names of a problem's tensors ("q k v bias", "o lse"), and the
// options that differ from their defaults, by name. XLA calls a handler without the GIL: only add_jax touches Python
// objects here.
#include "jax.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "append_fields.hpp"
#include "call.hpp"
#include "error.hpp"
#include "options.hpp"
#include "score.hpp"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tessera::python {
namespace {

// ---- attributes -----------------------------------------------------------------------------------------------------

class Attributes {
 public:
  explicit Attributes(const XLA_FFI_Attrs& attrs) : attrs_(attrs) {}

  std::string_view text(std::string_view name) const {
    const void* found = find(name, XLA_FFI_AttrType_STRING);
    if (!found) return "";
    const auto& span = *static_cast<const XLA_FFI_ByteSpan*>(found);
    return {span.ptr, span.len};
  }

  // `count` values of eight bytes; nullptr if the attribute is absent.
  template <class Value>
  const Value* values(std::string_view name, size_t count) const {
    constexpr XLA_FFI_DataType dtype = std::is_same_v<Value, double> ? XLA_FFI_DataType_F64 : XLA_FFI_DataType_S64;
    if (const void* found = find(name, XLA_FFI_AttrType_SCALAR)) {
      const auto& scalar = *static_cast<const XLA_FFI_Scalar*>(found);
      if (scalar.dtype == dtype && count == 1) return static_cast<const Value*>(scalar.value);
    } else if (const void* list = find(name, XLA_FFI_AttrType_ARRAY)) {
      const auto& array = *static_cast<const XLA_FFI_Array*>(list);
      if (array.dtype == dtype && array.size == count) return static_cast<const Value*>(array.data);
    } else {
      return nullptr;
    }
    throw Error(std::string(name) + ": an attribute of another type than tessera.jax gives it");
  }

  int64_t integer(std::string_view name) const {
    const int64_t* value = values<int64_t>(name, 1);
    return value ? *value : 0;
  }

 private:
  const void* find(std::string_view name, XLA_FFI_AttrType type) const {
    for (int64_t i = 0; i < attrs_.size; ++i) {
      const XLA_FFI_ByteSpan& span = *attrs_.names[i];
      if (attrs_.types[i] == type && std::string_view(span.ptr, span.len) == name) return attrs_.attrs[i];
    }
    return nullptr;
  }

  const XLA_FFI_Attrs& attrs_;
};

void set_member(tessera_problem& problem, const core::OptionMember& member, int64_t value) {
  if (member.flag) {
    problem.*member.flag = static_cast<int32_t>(value);
  } else if (member.unsigned_integer) {
    problem.*member.unsigned_integer = static_cast<uint64_t>(value);
  } else {
    problem.*member.integer = value;
  }
}

void set_options(tessera_problem& problem, const Attributes& attributes) {
  for (const core::OptionField& field : core::kOptionFields) {
    const core::OptionMember& member = field.members[0];
    if (member.number) {
      const double* value = attributes.values<double>(field.name, 1);
      if (!value) continue;
      problem.*member.number = *value;
      if (field.kind == core::OptionKind::kOptionalNumber) problem.has_scale = 1;
      continue;
    }
    const size_t count = field.kind == core::OptionKind::kPair ? 2 : 1;
    const int64_t* values = attributes.values<int64_t>(field.name, count);
    for (size_t i = 0; values && i < count; ++i) set_member(problem, field.members[i], values[i]);
  }
}

// ---- tensors --------------------------------------------------------------------------------------------------------

int32_t to_dtype(XLA_FFI_DataType dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_F32:
      return TESSERA_FLOAT32;
    case XLA_FFI_DataType_F16:
      return TESSERA_FLOAT16;
    case XLA_FFI_DataType_BF16:
      return TESSERA_BFLOAT16;
    case XLA_FFI_DataType_F64:
      return TESSERA_FLOAT64;
    case XLA_FFI_DataType_S32:
      return TESSERA_INT32;
    case XLA_FFI_DataType_S64:
      return TESSERA_INT64;
    case XLA_FFI_DataType_F8E4M3FN:
      return TESSERA_FLOAT8_E4M3;
    case XLA_FFI_DataType_F8E5M2:
      return TESSERA_FLOAT8_E5M2;
    case XLA_FFI_DataType_S8:
      return TESSERA_INT8;
    case XLA_FFI_DataType_PRED:
      return TESSERA_BOOL;
    case XLA_FFI_DataType_S16:
      return TESSERA_INT16;
    case XLA_FFI_DataType_U8:
      return TESSERA_UINT8;
    default:
      return -1;
  }
}

tessera_layout contiguous(int32_t dtype, const int64_t* dims, int64_t rank, const char* name) {
  if (rank < 1 || rank > TESSERA_MAX_RANK) {
    throw Error(std::string(name) + ": rank " + std::to_string(rank) + ", accepted 1 .. " +
                std::to_string(TESSERA_MAX_RANK));
  }
  tessera_layout layout{};
  layout.dtype = dtype;
  layout.rank = static_cast<int32_t>(rank);
  int64_t stride = 1;
  for (int64_t axis = rank - 1; axis >= 0; --axis) {
    layout.shape[axis] = dims[axis];
    layout.strides[axis] = stride;
    stride *= dims[axis];
  }
  return layout;
}

const core::TensorField& field_named(std::string_view name) {
  for (const core::TensorField& field : core::kTensorFields) {
    if (name == field.name) return field;
  }
  throw Error(std::string(name) + ": no tensor of a problem");
}

// By default JAX has no int64: seed and offset are four uint32, the lower half of each first.
bool is_state_in_halves(const core::TensorField& field, XLA_FFI_DataType dtype, int64_t rank, const int64_t* dims) {
  return field.layout == &tessera_problem::dropout_state && dtype == XLA_FFI_DataType_U32 && rank == 1 && dims[0] == 4;
}

// "captured2" and "d_captured2" are the third tensor of the call's program, and its gradient.
bool is_captured(std::string_view name) { return name.starts_with("captured") || name.starts_with("d_captured"); }

void set_captured(Call& call, std::string_view name, const tessera_layout& layout, void* data) {
  const auto slot = static_cast<size_t>(name.back() - '0');
  if (name.starts_with("d_")) {
    call.problem.d_captured[slot] = layout, call.buffers.d_captured[slot] = data;
  } else {
    call.problem.captured[slot] = layout, call.buffers.captured[slot] = data;
  }
}

void set_buffer(Call& call, std::string_view name, const XLA_FFI_Buffer& buffer) {
  if (is_captured(name)) {
    const tessera_layout layout = contiguous(to_dtype(buffer.dtype), buffer.dims, buffer.rank, "captured");
    return set_captured(call, name, layout, buffer.data);
  }
  const core::TensorField& field = field_named(name);
  tessera_layout& layout = call.problem.*field.layout;
  if (is_state_in_halves(field, buffer.dtype, buffer.rank, buffer.dims)) {
    const int64_t pair = 2;
    layout = contiguous(TESSERA_INT64, &pair, 1, field.name);
  } else {
    layout = contiguous(to_dtype(buffer.dtype), buffer.dims, buffer.rank, field.name);
  }
  field.set_pointer(call.buffers, buffer.data);
}

// set(name, buffer) for each name in `list`, separated by spaces.
template <class Set>
void for_each_buffer(std::string_view list, void** buffers, int64_t count, Set&& set) {
  for (int64_t i = 0; i < count; ++i) {
    const size_t end = std::min(list.find(' '), list.size());
    set(list.substr(0, end), *static_cast<const XLA_FFI_Buffer*>(buffers[i]));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
}

template <class Set>
void for_each_buffer(const Attributes& attributes, const XLA_FFI_CallFrame& frame, Set&& set) {
  for_each_buffer(attributes.text("operands"), frame.args.args, frame.args.size, set);
  for_each_buffer(attributes.text("results"), frame.rets.rets, frame.rets.size, set);
}

void swap_heads_first(tessera_problem& p) {
  for (tessera_layout* layout : {&p.q, &p.k, &p.v, &p.o, &p.d_o, &p.d_q, &p.d_k, &p.d_v}) swap_rows_and_heads(*layout);
}

// The score program of a call, from its texts. A thread keeps its last few, so that their plans are found again.
ProgramHandle program_of(const Attributes& attributes) {
  const std::string score(attributes.text("score")), mask(attributes.text("mask"));
  const std::string declared(attributes.text("declared"));
  if (score.empty() && mask.empty()) return nullptr;
  struct Known {
    std::string score, mask, declared;
    ProgramHandle program;
  };
  constexpr size_t kMostKnown = 32;
  thread_local std::vector<Known> known;
  for (const Known& each : known) {
    if (each.score == score && each.mask == mask && each.declared == declared) return each.program;
  }
  std::vector<DeclaredName> names;
  std::istringstream words(declared);
  for (DeclaredName name; words >> name.name >> name.type >> name.rank;) names.push_back(name);
  if (known.size() == kMostKnown) known.erase(known.begin());
  known.push_back({score, mask, declared, make_program(score, mask, names)});
  return known.back().program;
}

void set_program(Call& call, const Attributes& attributes) {
  call.program = program_of(attributes);
  call.problem.program = call.program.get();
  const int64_t count = attributes.integer("scalar_count");
  const double* scalars = attributes.values<double>("scalars", static_cast<size_t>(count));
  if (scalars) std::copy_n(scalars, count, call.buffers.scalars);
}

// Scratch memory of a call on a GPU: its result "workspace", uint8 [bytes].
struct Scratch {
  void* data = nullptr;
  int64_t bytes = 0;
};

Call call_of(const XLA_FFI_CallFrame& frame, Scratch& scratch) {
  const Attributes attributes(frame.attrs);
  Call call(attributes.integer("backward") ? TESSERA_BACKWARD : TESSERA_FORWARD);
  for_each_buffer(attributes, frame, [&](std::string_view name, const XLA_FFI_Buffer& buffer) {
    if (name == "workspace") {
      scratch = {buffer.data, buffer.dims[0]};
    } else {
      set_buffer(call, name, buffer);
    }
  });
  set_options(call.problem, attributes);
  set_program(call, attributes);
  call.kernel = static_cast<int32_t>(attributes.integer("kernel"));
  call.threads = static_cast<int32_t>(attributes.integer("threads"));
  if (attributes.integer("heads_first")) swap_heads_first(call.problem);
  return call;
}

tessera_append_call append_of(const XLA_FFI_CallFrame& frame) {
  const Attributes attributes(frame.attrs);
  tessera_append_call call{};
  call.interleaved = static_cast<int32_t>(attributes.integer("interleaved"));
  call.compute_scales = static_cast<int32_t>(attributes.integer("compute_scales"));
  // A tensor that is written is both operand and result: XLA gives both the same memory.
  for_each_buffer(attributes, frame, [&call](std::string_view name, const XLA_FFI_Buffer& buffer) {
    for (const AppendField& field : kAppendFields) {
      if (name != field.name) continue;
      call.*field.tensor = {contiguous(to_dtype(buffer.dtype), buffer.dims, buffer.rank, field.name), buffer.data};
      return;
    }
    throw Error(std::string(name) + ": no tensor of an append");
  });
  return call;
}

// ---- handlers -------------------------------------------------------------------------------------------------------

XLA_FFI_Error* error(const XLA_FFI_Api& api, XLA_FFI_Error_Code code, const char* message) {
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message, code};
  return api.XLA_FFI_Error_Create(&args);
}

// XLA asks once for the version of the interface that this was compiled for, and for what a handler's calls allow.
bool told_metadata(const XLA_FFI_CallFrame& frame, XLA_FFI_Handler_Traits traits) {
  XLA_FFI_Extension_Base* extension = frame.extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata& metadata = *reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
  metadata.api_version.major_version = XLA_FFI_API_MAJOR;
  metadata.api_version.minor_version = XLA_FFI_API_MINOR;
  metadata.traits = traits;
  return true;
}

constexpr XLA_FFI_Handler_Traits kOnCpu = 0;
// What a handler launches is a function of shapes and attributes, and all memory is XLA's: calls may be captured into
// XLA's command buffers and replayed without the handler.
constexpr XLA_FFI_Handler_Traits kOnCuda = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;

template <class Execute>
XLA_FFI_Error* handle(XLA_FFI_CallFrame& frame, XLA_FFI_Handler_Traits traits, Execute&& execute) noexcept {
  if (told_metadata(frame, traits)) return nullptr;
  if (frame.stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
  try {
    return execute();
  } catch (const std::bad_alloc&) {
    return error(*frame.api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "tessera: no memory for the workspace");
  } catch (const std::exception& refusal) {
    return error(*frame.api, XLA_FFI_Error_Code_INVALID_ARGUMENT, refusal.what());
  }
}

XLA_FFI_Error* handle_cpu(XLA_FFI_CallFrame* frame) {
  return handle(*frame, kOnCpu, [frame]() -> XLA_FFI_Error* {
    Scratch none;  // the thread has its own
    const Call call = call_of(*frame, none);
    tessera_executor executor{};
    check(run_on_cpu(call, plan_of(call), executor));
    return nullptr;
  });
}

XLA_FFI_Error* handle_append_on_cpu(XLA_FFI_CallFrame* frame) {
  return handle(*frame, kOnCpu, [frame]() -> XLA_FFI_Error* {
    const tessera_append_call call = append_of(*frame);
    tessera_executor executor{};
    check(tessera_append(&call, &cpu(), &executor));
    return nullptr;
  });
}

// The device and stream that a call is for.
XLA_FFI_Error* place_of(const XLA_FFI_CallFrame& frame, Place& place) {
  const XLA_FFI_Api& api = *frame.api;
  XLA_FFI_Stream_Get_Args stream{XLA_FFI_Stream_Get_Args_STRUCT_SIZE, nullptr, frame.ctx, nullptr};
  if (XLA_FFI_Error* failure = api.XLA_FFI_Stream_Get(&stream)) return failure;
  XLA_FFI_DeviceOrdinal_Get_Args ordinal{XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, nullptr, frame.ctx, 0};
  if (XLA_FFI_Error* failure = api.XLA_FFI_DeviceOrdinal_Get(&ordinal)) return failure;
  place = {kCuda, ordinal.device_ordinal, stream.stream};
  return nullptr;
}

// The plan for the call's device if its workspace has at most `bytes`. Otherwise that for fewer multiprocessors, among
// which the keys are divided into fewer parts: on a GPU that differs from the usual ones of its architecture.
const tessera_plan& plan_within(Call& call, int64_t bytes) {
  const tessera_plan* plan = &plan_of(call);
  while (plan->workspace_bytes > bytes && plan->device.cores > 1) {
    call.cores = plan->device.cores * 7 / 8;
    plan = &plan_of(call);
  }
  return *plan;  // execution refuses a workspace that is still too small
}

XLA_FFI_Error* handle_cuda(XLA_FFI_CallFrame* frame) {
  return handle(*frame, kOnCuda, [frame]() -> XLA_FFI_Error* {
    Scratch scratch;
    Call call = call_of(*frame, scratch);
    Place place;
    if (XLA_FFI_Error* failure = place_of(*frame, place)) return failure;
    call.place.join("q", place);
    tessera_executor executor{};
    executor.stream = place.stream;
    const tessera_plan& plan = plan_within(call, scratch.bytes);
    check(run_plan(plan, call.buffers, scratch.data, static_cast<size_t>(scratch.bytes), executor));
    return nullptr;
  });
}

XLA_FFI_Error* handle_append_on_cuda(XLA_FFI_CallFrame* frame) {
  return handle(*frame, kOnCuda, [frame]() -> XLA_FFI_Error* {
    const tessera_append_call call = append_of(*frame);
    Place place;
    if (XLA_FFI_Error* failure = place_of(*frame, place)) return failure;
    const tessera_device device = device_at(place, "k");
    tessera_executor executor{};
    executor.stream = place.stream;
    check(tessera_append(&call, &device, &executor));
    return nullptr;
  });
}

// ---- Python ---------------------------------------------------------------------------------------------------------

// By the target's name and the platform.
nb::dict handlers() {
  using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);
  const auto by_platform = [](Handler on_cpu, Handler on_cuda) {
    nb::dict result;
    result["cpu"] = nb::capsule(reinterpret_cast<void*>(on_cpu));
    result["CUDA"] = nb::capsule(reinterpret_cast<void*>(on_cuda));
    return result;
  };
  nb::dict by_target;
  by_target["tessera_attention"] = by_platform(&handle_cpu, &handle_cuda);
  by_target["tessera_append"] = by_platform(&handle_append_on_cpu, &handle_append_on_cuda);
  return by_target;
}

int32_t dtype_named(const std::string& name, int32_t last) {
  for (int32_t dtype = 0; dtype <= last; ++dtype) {
    if (name == tessera_dtype_name(dtype)) return dtype;
  }
  return -1;
}

using TracedTensor = std::tuple<std::string, std::string, std::vector<int64_t>>;  // name, dtype, shape

// A call of these layouts and options, without data.
Call traced_call(bool backward, const std::vector<TracedTensor>& tensors, const nb::kwargs& options) {
  Call call(backward ? TESSERA_BACKWARD : TESSERA_FORWARD);
  for (const auto& [name, dtype, shape] : tensors) {
    const auto rank = static_cast<int64_t>(shape.size());
    if (is_captured(name)) {
      const int32_t known = dtype_named(dtype, TESSERA_UINT8);
      if (known < 0) throw Error("captured: dtype " + dtype + ", accepted floats, bool, uint8 and int8 to int64");
      set_captured(call, name, contiguous(known, shape.data(), rank, "captured"), nullptr);
      continue;
    }
    const core::TensorField& field = field_named(name);
    const int32_t known = dtype_named(dtype, TESSERA_FLOAT8_E5M2);
    if (known < 0) {
      throw Error(name + ": dtype " + dtype + ", accepted " + core::dtypes_text(field.dtypes));
    }
    call.problem.*field.layout = contiguous(known, shape.data(), rank, field.name);
  }
  set_options(call, "attention", options);  // including the order of axes
  return call;
}

// Refuses a problem of these layouts and options if every device would refuse it.
void check_layouts(bool backward, const std::vector<TracedTensor>& tensors, const nb::kwargs& options) {
  plan_of(traced_call(backward, tensors, options));
}

// The most bytes of workspace that the call needs on a GPU of any architecture, with the usual number of
// multiprocessors, with 1/2 to 9/8 of it, or with one. Opens no driver.
int64_t workspace_on_gpus(bool backward, const std::vector<TracedTensor>& tensors, const nb::kwargs& options) {
  const Call call = traced_call(backward, tensors, options);
  constexpr int32_t kOldestArch = 80, kNewestArch = 129, kEighths = 8;
  int64_t most = 0;
  for (int32_t arch = kOldestArch; arch <= kNewestArch; ++arch) {
    tessera_device device;
    if (tessera_device_cuda_arch(arch, &device).code != TESSERA_OK) continue;
    set_family(device, call.kernel);
    const int32_t usual = device.cores;
    for (const int32_t eighths : {9, kEighths, 7, 6, 4, 0}) {
      device.cores = std::max(1, usual * eighths / kEighths);
      tessera_plan plan;
      if (tessera_make_plan(&call.problem, &device, &plan).code == TESSERA_OK) {
        most = std::max(most, plan.workspace_bytes);
      }
    }
  }
  return most;
}

}  // namespace

void add_jax(nb::module_& m) {
  m.def("jax_handlers", &handlers);
  m.def("check_layouts", &check_layouts, "backward"_a, "tensors"_a, "options"_a);
  m.def("workspace_on_gpus", &workspace_on_gpus, "backward"_a, "tensors"_a, "options"_a);
}

}  // namespace tessera::python
