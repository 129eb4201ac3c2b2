#include "options.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "call.hpp"
#include "error.hpp"

namespace nb = nanobind;

namespace tessera::python {
namespace {

// ---- tensors --------------------------------------------------------------------------------------------------------

enum class Written { kNever, kForward, kBackward };
enum class Given { kByName, kAsOption, kAsBackwardOption };  // by its own parameter, or among the options

struct TensorRow {
  const char* name;
  tessera_layout tessera_problem::*layout;
  void (*set_data)(tessera_buffers& buffers, void* data);
  Written written;
  Given given;
  const char* dtypes;
};

template <auto member>
void set_data(tessera_buffers& buffers, void* data) {
  auto& pointer = buffers.*member;
  pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(data);
}

constexpr const char* kFloating = "float32, float16, bfloat16 or float64";
constexpr const char* kFloat32OrAsQ = "float32 or that of q";
constexpr const char *kFloat32 = "float32", *kInt32 = "int32", *kBool = "bool";

using P = tessera_problem;
using B = tessera_buffers;
// clang-format off
constexpr TensorRow kTensors[] = {
    {"q",            &P::q,            set_data<&B::q>,            Written::kNever,    Given::kByName,           kFloating},
    {"k",            &P::k,            set_data<&B::k>,            Written::kNever,    Given::kByName,           kFloating},
    {"v",            &P::v,            set_data<&B::v>,            Written::kNever,    Given::kByName,           kFloating},
    {"o",            &P::o,            set_data<&B::o>,            Written::kForward,  Given::kByName,           kFloating},
    {"lse",          &P::lse,          set_data<&B::lse>,          Written::kForward,  Given::kByName,           kFloat32},
    {"d_o",          &P::d_o,          set_data<&B::d_o>,          Written::kNever,    Given::kByName,           kFloating},
    {"d_q",          &P::d_q,          set_data<&B::d_q>,          Written::kBackward, Given::kByName,           kFloating},
    {"d_k",          &P::d_k,          set_data<&B::d_k>,          Written::kBackward, Given::kByName,           kFloating},
    {"d_v",          &P::d_v,          set_data<&B::d_v>,          Written::kBackward, Given::kByName,           kFloating},
    {"bias",         &P::bias,         set_data<&B::bias>,         Written::kNever,    Given::kAsOption,         kFloat32OrAsQ},
    {"mask",         &P::mask,         set_data<&B::mask>,         Written::kNever,    Given::kAsOption,         kBool},
    {"block_mask",   &P::block_mask,   set_data<&B::block_mask>,   Written::kNever,    Given::kAsOption,         kBool},
    {"alibi_slopes", &P::alibi_slopes, set_data<&B::alibi_slopes>, Written::kNever,    Given::kAsOption,         kFloat32},
    {"sink",         &P::sink,         set_data<&B::sink>,         Written::kNever,    Given::kAsOption,         kFloat32},
    {"cu_seqlens_q", &P::cu_seqlens_q, set_data<&B::cu_seqlens_q>, Written::kNever,    Given::kAsOption,         kInt32},
    {"cu_seqlens_k", &P::cu_seqlens_k, set_data<&B::cu_seqlens_k>, Written::kNever,    Given::kAsOption,         kInt32},
    {"seqused_k",    &P::seqused_k,    set_data<&B::seqused_k>,    Written::kNever,    Given::kAsOption,         kInt32},
    {"page_table",   &P::page_table,   set_data<&B::page_table>,   Written::kNever,    Given::kAsOption,         kInt32},
    {"d_lse",        &P::d_lse,        set_data<&B::d_lse>,        Written::kNever,    Given::kAsBackwardOption, kFloat32},
    {"d_bias",       &P::d_bias,       set_data<&B::d_bias>,       Written::kBackward, Given::kAsBackwardOption, kFloat32},
    {"d_sink",       &P::d_sink,       set_data<&B::d_sink>,       Written::kBackward, Given::kAsBackwardOption, kFloat32},
};
// clang-format on
static_assert(std::size(kTensors) == kMaxTensors, "one row for each pointer of tessera_buffers");

void set_tensor(Call& call, const TensorRow& row, nb::handle value) {
  if (value.is_none()) return;
  const bool written = (row.written == Written::kForward && call.problem.direction == TESSERA_FORWARD) ||
                       (row.written == Written::kBackward && call.problem.direction == TESSERA_BACKWARD);
  Array array = import_array(row.name, value, written ? Access::kWrite : Access::kRead, row.dtypes);
  // Where nothing computes, no other complaint matters.
  if (!call.place.first() && array.place.device_type != kCpu) device_at(array.place, row.name);
  call.place.join(row.name, array.place);
  call.problem.*row.layout = array.layout;
  row.set_data(call.buffers, array.data);
  if (array.owner.is_valid()) call.owners[&row - kTensors] = std::move(array.owner);
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

// Of the whole library: what a device does not have, its plan refuses with the reason.
std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  const std::string end = "unknown";
  for (int32_t kernel = TESSERA_KERNEL_AUTO; tessera_kernel_name(kernel) != end; ++kernel) {
    names.emplace_back(tessera_kernel_name(kernel));
  }
  return names;
}

int32_t to_kernel(const char* name, nb::handle value) {
  const std::vector<std::string> names = kernel_names();
  std::string accepted;
  for (const std::string& known : names) accepted += (accepted.empty() ? "\"" : ", \"") + known + "\"";
  const std::string text = convert<nb::str>(name, value, accepted.c_str()).c_str();
  const auto found = std::find(names.begin(), names.end(), text);
  if (found != names.end()) return static_cast<int32_t>(found - names.begin());
  throw Error(std::string(name) + ": \"" + text.substr(0, 80) + "\", accepted " + accepted);
}

struct ValueRow {
  const char* name;
  void (*set)(const char* name, Call& call, nb::handle value);
};

template <auto member>
void set_number(const char* name, Call& call, nb::handle value) {
  call.problem.*member = convert<double>(name, value, "a number");
}
template <auto member>
void set_integer(const char* name, Call& call, nb::handle value) {
  call.problem.*member = to_integer(name, value);
}
template <auto member>
void set_unsigned(const char* name, Call& call, nb::handle value) {
  call.problem.*member = convert<uint64_t>(name, value, "an integer, 0 .. 2^64 - 1");
}
template <auto member>
void set_flag(const char* name, Call& call, nb::handle value) {
  call.problem.*member = convert<bool>(name, value, "True or False");
}
template <auto first, auto second>
void set_pair(const char* name, Call& call, nb::handle value) {
  const Pair pair = to_pair(name, value);
  call.problem.*first = pair.first;
  call.problem.*second = pair.second;
}

constexpr ValueRow kValues[] = {
    {"scale",
     [](const char* name, Call& call, nb::handle value) {
       call.problem.has_scale = !value.is_none();
       if (call.problem.has_scale) call.problem.scale = convert<double>(name, value, "a number or None");
     }},
    {"causal", set_flag<&P::causal>},
    {"top_left",
     [](const char* name, Call& call, nb::handle value) {
       call.problem.alignment = convert<bool>(name, value, "True or False") ? TESSERA_TOP_LEFT : TESSERA_BOTTOM_RIGHT;
     }},
    {"window", set_pair<&P::window_left, &P::window_right>},
    {"softcap", set_number<&P::softcap>},
    {"mask_block", set_pair<&P::mask_block_q, &P::mask_block_k>},
    {"dropout_p", set_number<&P::dropout_p>},
    {"dropout_seed", set_unsigned<&P::dropout_seed>},
    {"dropout_offset", set_unsigned<&P::dropout_offset>},
    {"max_seqlen_q", set_integer<&P::max_seqlen_q>},
    {"max_seqlen_k", set_integer<&P::max_seqlen_k>},
    {"deterministic", set_flag<&P::deterministic>},
    {"batch_invariant", set_flag<&P::batch_invariant>},
    {"kernel", [](const char* name, Call& call, nb::handle value) { call.kernel = to_kernel(name, value); }},
    {"threads",
     [](const char* name, Call& call, nb::handle value) {
       const int64_t threads = to_integer(name, value);
       constexpr int64_t kMostThreads = 1024;
       if (threads < 0 || threads > kMostThreads) {
         throw Error("threads: " + std::to_string(threads) + ", accepted 1 .. 1024, or 0 for all");
       }
       call.threads = static_cast<int32_t>(threads);
     }},
    {"workspace", [](const char*, Call& call, nb::handle value) { call.allocate = nb::borrow(value); }},
    {"openmp",
     [](const char* name, Call& call, nb::handle value) { call.openmp = convert<bool>(name, value, "True or False"); }},
};

bool set_option(Call& call, std::string_view name, nb::handle value) {
  for (const ValueRow& row : kValues) {
    if (name == row.name) {
      row.set(row.name, call, value);
      return true;
    }
  }
  for (const TensorRow& row : kTensors) {
    if (row.given == Given::kByName || name != row.name) continue;
    if (row.given == Given::kAsBackwardOption && call.problem.direction != TESSERA_BACKWARD) return false;
    set_tensor(call, row, value);
    return true;
  }
  return false;
}

}  // namespace

Call::Call(tessera_direction direction) {
  std::memset(&problem, 0, sizeof problem);  // plans are found by the bytes of their problem
  tessera_problem_init(&problem);
  problem.direction = direction;
}

void set_tensor(Call& call, const char* name, nb::handle value) {
  for (const TensorRow& row : kTensors) {
    if (std::strcmp(row.name, name) == 0) return set_tensor(call, row, value);
  }
}

void set_options(Call& call, const char* function, const nb::kwargs& options) {
  for (const auto& [key, value] : options) {
    Py_ssize_t size = 0;
    const char* name = PyUnicode_AsUTF8AndSize(key.ptr(), &size);
    if (!name) nb::raise_python_error();
    if (set_option(call, {name, static_cast<size_t>(size)}, value)) continue;
    throw nb::type_error((std::string(function) + "() got an unexpected keyword argument '" + name + "'").c_str());
  }
}

}  // namespace tessera::python
