#include "program.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "call.hpp"
#include "cli/info.hpp"
#include "cli/sized_problem.hpp"
#include "cli/support.hpp"
#include "core/fields.hpp"
#include "error.hpp"
#include "options.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tessera::python {
namespace {

std::string info(bool as_json) { return as_json ? cli::info_json(cpu()) : cli::info_text(cpu()); }

std::string support(const std::string& form) {
  return form == "json" ? cli::support_json() : form == "markdown" ? cli::support_markdown() : cli::support_text();
}

void copy_options(const tessera_problem& from, tessera_problem& to) {
  for (const core::OptionField& field : core::kOptionFields) {
    for (const core::OptionMember& member : field.members) {
      if (member.flag) to.*member.flag = from.*member.flag;
      if (member.integer) to.*member.integer = from.*member.integer;
      if (member.unsigned_integer) to.*member.unsigned_integer = from.*member.unsigned_integer;
      if (member.number) to.*member.number = from.*member.number;
    }
  }
  to.has_scale = from.has_scale;
}

int32_t dtype_named(const std::string& name) {
  for (const int32_t dtype : {TESSERA_FLOAT32, TESSERA_FLOAT16, TESSERA_BFLOAT16, TESSERA_FLOAT64}) {
    if (name == tessera_dtype_name(dtype)) return dtype;
  }
  throw Error("dtype: \"" + name.substr(0, 80) + "\", accepted float32, float16, bfloat16 and float64");
}

using Sizes = std::vector<int64_t>;  // batch, sq, sk, heads, kv_heads, head_dim, dv

// For `arch`, a GPU that need not be in this machine; otherwise for GPU `ordinal`; otherwise for the CPU.
std::string plan_of_sizes(const Sizes& sizes, const std::string& dtype, bool backward,
                          const std::vector<std::string>& tensors, std::optional<int32_t> arch,
                          std::optional<int32_t> ordinal, bool as_json, const nb::kwargs& options) {
  if (sizes.size() != 7) throw Error("sizes: 7 numbers are accepted");
  Call call(backward ? TESSERA_BACKWARD : TESSERA_FORWARD);
  set_options(call, "plan", options);
  cli::ProblemSizes sized;
  sized.batch = sizes[0], sized.seqlen_q = sizes[1], sized.seqlen_k = sizes[2], sized.heads_q = sizes[3];
  sized.heads_kv = sizes[4], sized.head_dim = sizes[5], sized.head_dim_v = sizes[6];
  sized.dtype = static_cast<tessera_dtype>(dtype_named(dtype));
  sized.direction = backward ? TESSERA_BACKWARD : TESSERA_FORWARD;
  for (const core::TensorField& field : core::kTensorFields) {
    for (const std::string& name : tensors) sized[field] = sized[field] || name == field.name;
  }
  tessera_problem problem;
  try {
    problem = cli::problem_of(sized, [&call](tessera_problem& p) { copy_options(call.problem, p); });
  } catch (const std::runtime_error& refusal) {
    throw Error(refusal.what());
  }
  tessera_device device;
  if (arch) {
    check(tessera_device_cuda_arch(*arch, &device));
  } else {
    device = device_at(ordinal ? Place{kCuda, *ordinal} : Place{}, "device");
  }
  set_family(device, call.kernel);
  if (call.threads > 0) device.threads = call.threads;
  tessera_plan plan;
  check(tessera_make_plan(&problem, &device, &plan));
  const auto write = as_json ? tessera_plan_json : tessera_plan_describe;
  std::string text(write(&plan, nullptr, 0), '\0');
  write(&plan, text.data(), text.size() + 1);
  return text;
}

}  // namespace

void add_program(nb::module_& m) {
  m.def("info", &info, "as_json"_a);
  m.def("support", &support, "form"_a);
  m.def("plan_of_sizes", &plan_of_sizes, "sizes"_a, "dtype"_a, "backward"_a, "tensors"_a, "arch"_a.none(),
        "ordinal"_a.none(), "as_json"_a, "options"_a);
}

}  // namespace tessera::python
