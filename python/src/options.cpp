#include "options.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "call.hpp"
#include "error.hpp"

namespace nb = nanobind;

namespace tessera::python {
namespace {

// ---- tensors --------------------------------------------------------------------------------------------------------

void set_tensor(Call& call, const core::TensorField& field, nb::handle value) {
  if (value.is_none()) return;
  const bool written = core::written(field, call.problem.direction == TESSERA_BACKWARD);
  Array array =
      import_array(field.name, value, written ? Access::kWrite : Access::kRead, core::dtypes_text(field.dtypes));
  if (!array.has_data) call.without_data = field.name;
  // Without a device that computes, no other error matters.
  if (!call.place.first() && array.place.device_type > kCpu) device_at(array.place, field.name);
  call.place.join(field.name, array.place);
  call.problem.*field.layout = array.layout;
  field.set_pointer(call.buffers, array.data);
  if (array.owner.is_valid()) call.owners[&field - core::kTensorFields] = std::move(array.owner);
}

// ---- values ---------------------------------------------------------------------------------------------------------

template <class T>
T convert(const char* name, nb::handle value, const char* accepted) {
  T result{};
  if (nb::try_cast(value, result)) return result;
  throw Error(std::string(name) + ": " + nb::cast<std::string>(nb::repr(value)).substr(0, 80) + " of type " +
              nb::cast<std::string>(nb::str(nb::type_name(value.type()))) + ", accepted " + accepted);
}

int64_t to_integer(const char* name, nb::handle value) { return convert<int64_t>(name, value, "an integer"); }

struct Pair {
  int64_t first, second;
};
Pair to_pair(const char* name, nb::handle value) {
  constexpr const char* kAccepted = "a pair of integers";
  const nb::sequence items = convert<nb::sequence>(name, value, kAccepted);
  if (nb::isinstance<nb::str>(value) || nb::len(items) != 2) {
    throw Error(std::string(name) + ": " + nb::cast<std::string>(nb::repr(value)).substr(0, 80) + ", accepted " +
                kAccepted);
  }
  const nb::object first = items[0], second = items[1];
  return {to_integer(name, first), to_integer(name, second)};
}

// "auto" and the names of all families of the library. If a device lacks one, its plan refuses it with the reason.
const std::vector<std::string>& kernels() {
  static const std::vector<std::string>& names = *new std::vector<std::string>([] {
    std::vector<std::string> all = {"auto"};
    tessera_family family;
    for (int32_t n = 0; n < tessera_num_families(); ++n) {
      check(tessera_family_at(n, &family));
      all.emplace_back(family.name);
    }
    return all;
  }());
  return names;
}

std::string accepted_kernels() {
  std::string accepted;
  for (const std::string& name : kernels()) accepted += (accepted.empty() ? "\"" : ", \"") + name + "\"";
  return accepted;
}

int32_t to_kernel(const char* name, nb::handle value) {
  const std::string accepted = accepted_kernels();
  const std::string text = convert<nb::str>(name, value, accepted.c_str()).c_str();
  const auto found = std::ranges::find(kernels(), text);
  if (found != kernels().end()) return static_cast<int32_t>(found - kernels().begin());
  throw Error(std::string(name) + ": \"" + text.substr(0, 80) + "\", accepted " + accepted);
}

bool to_heads_first(const char* name, nb::handle value) {
  constexpr const char* kAccepted = "\"bshd\", [B, S, H, D], or \"bhsd\", [B, H, S, D]";
  const std::string text = convert<nb::str>(name, value, kAccepted).c_str();
  if (text != "bshd" && text != "bhsd") {
    throw Error(std::string(name) + ": \"" + text.substr(0, 80) + "\", accepted " + kAccepted);
  }
  return text == "bhsd";
}

void set_member(Call& call, const core::OptionMember& member, int64_t value) {
  if (member.flag) {
    call.problem.*member.flag = static_cast<int32_t>(value);
  } else {
    call.problem.*member.integer = value;
  }
}

void set_value(Call& call, const core::OptionField& field, nb::handle value) {
  const core::OptionMember& member = field.members[0];
  switch (field.kind) {
    case core::OptionKind::kFlag:
    case core::OptionKind::kAlignment:
      return set_member(call, member, convert<bool>(field.name, value, "True or False"));
    case core::OptionKind::kOptionalNumber:
      call.problem.has_scale = !value.is_none();
      if (call.problem.has_scale) call.problem.*member.number = convert<double>(field.name, value, "a number or None");
      return;
    case core::OptionKind::kNumber:
      call.problem.*member.number = convert<double>(field.name, value, "a number");
      return;
    case core::OptionKind::kInteger:
      return set_member(call, member, to_integer(field.name, value));
    case core::OptionKind::kUnsigned:
      call.problem.*member.unsigned_integer = convert<uint64_t>(field.name, value, "an integer, 0 .. 2^64 - 1");
      return;
    case core::OptionKind::kPair: {
      const Pair pair = to_pair(field.name, value);
      set_member(call, member, pair.first);
      return set_member(call, field.members[1], pair.second);
    }
  }
}

// A problem's option as a Python value.
nb::object value_of(const tessera_problem& problem, const core::OptionField& field) {
  const core::OptionMember& member = field.members[0];
  const auto integer = [&problem](const core::OptionMember& m) {
    return m.flag ? int64_t{problem.*m.flag} : problem.*m.integer;
  };
  switch (field.kind) {
    case core::OptionKind::kFlag:
    case core::OptionKind::kAlignment:
      return nb::cast(integer(member) != 0);
    case core::OptionKind::kOptionalNumber:
      return problem.has_scale ? nb::cast(problem.*member.number) : nb::none();
    case core::OptionKind::kNumber:
      return nb::cast(problem.*member.number);
    case core::OptionKind::kInteger:
      return nb::cast(integer(member));
    case core::OptionKind::kUnsigned:
      return nb::cast(problem.*member.unsigned_integer);
    case core::OptionKind::kPair:
      return nb::make_tuple(integer(member), integer(field.members[1]));
  }
  return nb::none();
}

// ---- score programs -------------------------------------------------------------------------------------------------

void set_program(const char* name, Call& call, nb::handle value) {
  if (value.is_none()) return;
  call.program = convert<const ScoreProgram*>(name, value, "a ScoreProgram")->handle;
  call.problem.program = call.program.get();
}

// Calls set(array) for each array of a sequence; None: absent.
template <class Set>
void for_each_array(const char* name, Call& call, nb::handle value, Access access, const Set& set) {
  if (value.is_none()) return;
  constexpr const char* kAccepted = "float32, float16, bfloat16, float64, int8, int16, int32, int64, uint8 or bool";
  const nb::sequence arrays = convert<nb::sequence>(name, value, "a sequence of arrays");
  const size_t count = nb::len(arrays);
  if (count > TESSERA_MAX_CAPTURED_TENSORS) {
    throw Error(std::string(name) + ": " + std::to_string(count) + " arrays, accepted at most " +
                std::to_string(TESSERA_MAX_CAPTURED_TENSORS));
  }
  for (size_t slot = 0; slot < count; ++slot) {
    nb::object source = arrays[slot];
    if (source.is_none()) continue;
    const std::string own = std::string(name) + "[" + std::to_string(slot) + "]";
    Array array = import_array(own.c_str(), source, access, kAccepted);
    if (!array.has_data) call.without_data = name;
    call.place.join(name, array.place);
    set(slot, array);
    if (array.owner.is_valid()) call.captured_owners.push_back(std::move(array.owner));
    call.captured.push_back(std::move(source));
  }
}

void set_captured(const char* name, Call& call, nb::handle value) {
  for_each_array(name, call, value, Access::kRead, [&call](size_t slot, const Array& array) {
    call.problem.captured[slot] = array.layout, call.buffers.captured[slot] = array.data;
  });
}

void set_captured_gradients(const char* name, Call& call, nb::handle value) {
  for_each_array(name, call, value, Access::kWrite, [&call](size_t slot, const Array& array) {
    call.problem.d_captured[slot] = array.layout, call.buffers.d_captured[slot] = array.data;
  });
}

void set_scalars(const char* name, Call& call, nb::handle value) {
  const nb::sequence numbers = convert<nb::sequence>(name, value, "a sequence of numbers");
  const size_t count = nb::len(numbers);
  if (count > TESSERA_MAX_CAPTURED_SCALARS) {
    throw Error(std::string(name) + ": " + std::to_string(count) + " numbers, accepted at most " +
                std::to_string(TESSERA_MAX_CAPTURED_SCALARS));
  }
  for (size_t n = 0; n < count; ++n) {
    const nb::object number = numbers[n];
    call.buffers.scalars[n] = convert<double>(name, number, "numbers");
  }
}

// How and where a call runs, which is not a part of the problem.
struct ExecutionOption {
  const char* name;
  std::string (*annotation)();  // for the stubs; nullptr: only for the library's own Python
  nb::object (*fallback)();     // the default
  void (*set)(const char* name, Call& call, nb::handle value);
};
constexpr ExecutionOption kExecutionOptions[] = {
    {"kernel", [] { return "Literal[" + accepted_kernels() + "]"; }, [] { return nb::cast("auto"); },
     [](const char* name, Call& call, nb::handle value) { call.kernel = to_kernel(name, value); }},
    {"threads", [] { return std::string("int"); }, [] { return nb::cast(0); },
     [](const char* name, Call& call, nb::handle value) {
       const int64_t threads = to_integer(name, value);
       constexpr int64_t kMostThreads = 1024;
       if (threads < 0 || threads > kMostThreads) {
         throw Error("threads: " + std::to_string(threads) + ", accepted 1 .. 1024, or 0 for all");
       }
       call.threads = static_cast<int32_t>(threads);
     }},
    {"layout", [] { return std::string("Literal[\"bshd\", \"bhsd\"]"); }, [] { return nb::cast("bshd"); },
     [](const char* name, Call& call, nb::handle value) { call.heads_first = to_heads_first(name, value); }},
    {"openmp", [] { return std::string("bool"); }, [] { return nb::cast(false); },
     [](const char* name, Call& call, nb::handle value) { call.openmp = convert<bool>(name, value, "True or False"); }},
    {"workspace", nullptr, nullptr,
     [](const char*, Call& call, nb::handle value) { call.allocate = nb::borrow(value); }},
    // A score program, its captured tensors and scalars, and their gradients, by number.
    {"program", nullptr, nullptr, set_program},
    {"captured", nullptr, nullptr, set_captured},
    {"d_captured", nullptr, nullptr, set_captured_gradients},
    {"scalars", nullptr, nullptr, set_scalars},
};

bool set_option(Call& call, std::string_view name, nb::handle value) {
  for (const core::OptionField& field : core::kOptionFields) {
    if (name == field.name) {
      set_value(call, field, value);
      return true;
    }
  }
  for (const core::TensorField& field : core::kTensorFields) {
    if (name != field.name || !core::is_option(field)) continue;
    if (!core::takes_part(field, call.problem.direction == TESSERA_BACKWARD)) return false;
    set_tensor(call, field, value);
    return true;
  }
  for (const ExecutionOption& option : kExecutionOptions) {
    if (name == option.name) {
      option.set(option.name, call, value);
      return true;
    }
  }
  return false;
}

// The annotation of an option in the stubs.
const char* annotation_of(core::OptionKind kind) {
  switch (kind) {
    case core::OptionKind::kFlag:
    case core::OptionKind::kAlignment:
      return "bool";
    case core::OptionKind::kNumber:
      return "float";
    case core::OptionKind::kOptionalNumber:
      return "float | None";
    case core::OptionKind::kInteger:
    case core::OptionKind::kUnsigned:
      return "int";
    case core::OptionKind::kPair:
      return "tuple[int, int]";
  }
  return "";
}

}  // namespace

void set_family(tessera_device& device, int32_t kernel) {
  if (kernel <= 0) return;
  if (static_cast<size_t>(kernel) >= kernels().size()) {
    throw Error("kernel: " + std::to_string(kernel) + ", accepted 0 .. " + std::to_string(kernels().size() - 1));
  }
  std::snprintf(device.family, sizeof device.family, "%s", kernels()[static_cast<size_t>(kernel)].c_str());
}

nb::list kernel_names() {
  nb::list names;
  for (const std::string& name : kernels()) names.append(name);
  return names;
}

nb::list option_fields() {
  nb::list fields;
  const auto add = [&fields](const char* name, const std::string& annotation, const char* kind,
                             const nb::object& fallback = nb::none()) {
    nb::dict field;
    field["name"] = name;
    field["annotation"] = annotation;
    field["kind"] = kind;
    field["default"] = fallback;
    fields.append(field);
    return field;
  };
  const auto add_tensor = [&add](const core::TensorField& tensor, const char* kind) {
    nb::dict field = add(tensor.name, "Any", kind);
    nb::list shapes;
    for (const core::Shape* shape : {&tensor.dense, &tensor.packed}) {
      if (shape->rank > 0) shapes.append(core::symbols_of(*shape).text);
    }
    field["shapes"] = shapes;
    field["dtypes"] = core::dtypes_text(tensor.dtypes);
    field["what"] = tensor.what;
  };
  for (const core::TensorField& field : core::kTensorFields) {
    if (core::of_several_calls(field)) continue;
    if (field.need == core::Need::kIfGiven) {
      add_tensor(field, field.written == core::Written::kNever ? "tensor" : "result");
    }
    if (field.need == core::Need::kIfGivenBackward) add_tensor(field, "backward tensor");
  }
  const Call fresh(TESSERA_FORWARD);
  for (const core::OptionField& field : core::kOptionFields) {
    if (core::of_several_calls(field)) continue;
    add(field.name, annotation_of(field.kind), "value", value_of(fresh.problem, field));
  }
  for (const ExecutionOption& option : kExecutionOptions) {
    if (option.annotation) add(option.name, option.annotation(), "execution", option.fallback());
  }
  return fields;
}

Call::Call(tessera_direction direction) {
  std::memset(&problem, 0, sizeof problem);  // plans are looked up by the bytes of their problem
  tessera_problem_init(&problem);
  problem.direction = direction;
}

void set_tensor(Call& call, core::TensorName name, nb::handle value) {
  set_tensor(call, core::kTensorFields[name.index], value);
}

void swap_rows_and_heads(tessera_layout& layout) {
  if (layout.rank < 3) return;
  const int rows = layout.rank - 3, heads = layout.rank - 2;
  std::swap(layout.shape[rows], layout.shape[heads]);
  std::swap(layout.strides[rows], layout.strides[heads]);
}

void set_options(Call& call, const char* function, const nb::kwargs& options) {
  for (const auto& [key, value] : options) {
    Py_ssize_t size = 0;
    const char* name = PyUnicode_AsUTF8AndSize(key.ptr(), &size);
    if (!name) nb::raise_python_error();
    if (set_option(call, {name, static_cast<size_t>(size)}, value)) continue;
    const nb::object text = nb::module_::import_("tessera._hints").attr("unexpected_option")(function, key);
    throw nb::type_error(nb::cast<std::string>(text).c_str());
  }
  if (!call.heads_first) return;
  tessera_problem& p = call.problem;
  for (tessera_layout* layout : {&p.q, &p.k, &p.v, &p.o, &p.d_o, &p.d_q, &p.d_k, &p.d_v}) swap_rows_and_heads(*layout);
}

}  // namespace tessera::python
