// tessera._core: the C interface for Python. Outputs are the caller's arrays, as they are in C; tessera/_attention.py
// and tessera/torch make them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "append_fields.hpp"
#include "array.hpp"
#include "call.hpp"
#include "comparison.hpp"
#include "core/append.hpp"
#include "core/validate.hpp"
#include "error.hpp"
#include "interrupt.hpp"
#include "jax.hpp"
#include "options.hpp"
#include "program.hpp"
#include "ranks.hpp"
#include "released_gil.hpp"
#include "score.hpp"
#include "tessera/tessera.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tessera::python {
namespace {

// by_heads: q, k, v and their gradients are [B, H, S, D], o and d_o are not.
template <bool by_heads>
void forward(nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, const nb::kwargs& options) {
  Call call(TESSERA_FORWARD);
  set_tensor(call, "q", q);
  set_tensor(call, "k", k);
  set_tensor(call, "v", v);
  set_tensor(call, "o", o);
  set_tensor(call, "lse", lse);
  if constexpr (by_heads) {
    for (tessera_layout* layout : {&call.problem.q, &call.problem.k, &call.problem.v}) swap_rows_and_heads(*layout);
  }
  set_options(call, "attention", options);
  execute(call);
}

template <bool by_heads>
void backward(nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::handle d_o, nb::handle d_q,
              nb::handle d_k, nb::handle d_v, const nb::kwargs& options) {
  Call call(TESSERA_BACKWARD);
  set_tensor(call, "q", q);
  set_tensor(call, "k", k);
  set_tensor(call, "v", v);
  set_tensor(call, "o", o);
  set_tensor(call, "lse", lse);
  set_tensor(call, "d_o", d_o);
  set_tensor(call, "d_q", d_q);
  set_tensor(call, "d_k", d_k);
  set_tensor(call, "d_v", d_v);
  if constexpr (by_heads) {
    tessera_problem& p = call.problem;
    for (tessera_layout* layout : {&p.q, &p.k, &p.v, &p.d_q, &p.d_k, &p.d_v}) swap_rows_and_heads(*layout);
  }
  set_options(call, "attention_backward", options);
  execute(call);
}

// ---- plans ----------------------------------------------------------------------------------------------------------

void make_contiguous(tessera_layout& layout) {
  int64_t stride = 1;
  for (int axis = layout.rank - 1; axis >= 0; --axis) {
    layout.strides[axis] = stride;
    stride *= layout.shape[axis];
  }
}

// Outputs and cotangents that were not given are planned as contiguous, in the order of the call's axes; of a call that
// accumulates, as float32, or float64 beside float64 inputs.
void fill_in_layouts(Call& call) {
  tessera_problem& problem = call.problem;
  const auto make_contiguous_array = [&call](tessera_layout& layout) {
    if (call.heads_first) swap_rows_and_heads(layout);
    make_contiguous(layout);
    if (call.heads_first) swap_rows_and_heads(layout);
  };
  const auto as = [&](tessera_layout& layout, const tessera_layout& twin) {
    if (layout.rank != 0) return;
    layout = twin;
    make_contiguous_array(layout);
  };
  const auto as_sum = [&](tessera_layout& layout) {
    if (problem.accumulate && problem.q.dtype != TESSERA_FLOAT64) layout.dtype = TESSERA_FLOAT32;
  };
  const tessera_layout &q = problem.q, &v = problem.v;
  if (problem.o.rank == 0 && q.rank != 0 && v.rank != 0) {
    problem.o = q;
    problem.o.shape[q.rank - 1] = v.shape[v.rank - 1];
    make_contiguous_array(problem.o);
    if (problem.direction == TESSERA_FORWARD && problem.o_accum.rank == 0) as_sum(problem.o);
  }
  if (problem.direction != TESSERA_BACKWARD) return;
  if (problem.lse.rank == 0 && q.rank >= 3) {
    problem.lse = {TESSERA_FLOAT32, q.rank - 1, {}, {}};
    if (q.rank == 4) problem.lse.shape[0] = q.shape[0];
    problem.lse.shape[q.rank - 3] = q.shape[q.rank - 2];
    problem.lse.shape[q.rank - 2] = q.shape[q.rank - 3];
    make_contiguous(problem.lse);
  }
  as(problem.d_o, problem.o);
  for (const auto& [gradient, of] :
       {std::pair{&problem.d_q, &problem.q}, {&problem.d_k, &problem.k}, {&problem.d_v, &problem.v}}) {
    if (gradient->rank != 0) continue;
    as(*gradient, *of);
    as_sum(*gradient);
  }
}

using Writer = size_t (*)(const tessera_plan*, char*, size_t);

std::string text_of(const tessera_plan& plan, Writer write) {
  std::string text(write(&plan, nullptr, 0), '\0');
  write(&plan, text.data(), text.size() + 1);
  return text;
}

const tessera_plan& plan_for(const std::string& direction, nb::handle q, nb::handle k, nb::handle v, nb::handle o,
                             nb::handle lse, nb::handle d_o, const nb::kwargs& options) {
  const bool backward = direction == "backward";
  if (!backward && direction != "forward") {
    throw Error("direction: \"" + direction.substr(0, 80) + "\", accepted \"forward\" or \"backward\"");
  }
  Call call(backward ? TESSERA_BACKWARD : TESSERA_FORWARD);
  set_tensor(call, "q", q);
  set_tensor(call, "k", k);
  set_tensor(call, "v", v);
  set_tensor(call, "o", o);
  set_tensor(call, "lse", lse);
  if (!d_o.is_none()) set_tensor(call, "d_o", d_o);
  set_options(call, "plan", options);
  fill_in_layouts(call);
  return plan_of(call);
}

template <Writer write>
std::string plan(const std::string& direction, nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse,
                 const nb::kwargs& options) {
  return text_of(plan_for(direction, q, k, v, o, lse, nb::none(), options), write);
}

void check_call(const std::string& direction, nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse,
                nb::handle d_o, const nb::kwargs& options) {
  plan_for(direction, q, k, v, o, lse, d_o, options);
}

// ---- the rest -------------------------------------------------------------------------------------------------------

// A call without a plan, on the device of its arrays: with the GIL released, and interruptible by Ctrl-C.
template <class Call>
void run_at(const CommonPlace& place, Call&& call) {
  const tessera_device device = device_at(place.place(), place.first());
  tessera_executor executor{};
  executor.stream = place.place().stream;
  Interrupt interrupt;
  interrupt.add_to(executor);
  tessera_status status;
  {
    const ReleasedGil released;
    status = call(device, executor);
  }
  Interrupt::check(status);
}

void combine(nb::handle o_parts, nb::handle lse_parts, nb::handle o, nb::handle lse, nb::handle lse_low_parts,
             nb::handle lse_low) {
  constexpr const char* kFloating = "float32, float16 or bfloat16";
  constexpr const char* kFloat32 = "float32";
  tessera_combine_call call{};
  CommonPlace place;
  std::vector<Array> arrays;  // keep the data alive
  const auto import = [&](const char* name, nb::handle source, Access access, const char* accepted_dtypes,
                          tessera_tensor& tensor) {
    if (source.is_none()) return;
    arrays.push_back(import_array(name, source, access, accepted_dtypes));
    const Array& array = arrays.back();
    place.join(name, array.place);
    tensor = {array.layout, array.data};
  };
  import("o_parts", o_parts, Access::kRead, kFloating, call.o_parts);
  import("lse_parts", lse_parts, Access::kRead, kFloat32, call.lse_parts);
  import("lse_low_parts", lse_low_parts, Access::kRead, kFloat32, call.lse_low_parts);
  import("o", o, Access::kWrite, kFloating, call.o);
  import("lse", lse, Access::kWrite, kFloat32, call.lse);
  import("lse_low", lse_low, Access::kWrite, kFloat32, call.lse_low);
  if (!arrays.front().has_data) return check(core::validate(call));
  run_at(place, [&](const tessera_device& device, const tessera_executor& executor) {
    return tessera_combine(&call, &device, &executor);
  });
}

void append(nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache, nb::handle seqused_k,
            nb::handle cu_seqlens, nb::handle page_table, nb::handle q, nb::handle q_out, nb::handle cos,
            nb::handle sin, nb::handle positions_q, nb::handle positions_k, nb::handle dropped, nb::handle k_descale,
            nb::handle v_descale, bool interleaved, bool compute_scales) {
  tessera_append_call call{};
  call.interleaved = interleaved, call.compute_scales = compute_scales;
  const bool in_place = !q.is_none() && q_out.is_none();
  const nb::handle sources[] = {k,     v,   k_cache, v_cache,     seqused_k,   cu_seqlens, page_table, q,
                                q_out, cos, sin,     positions_q, positions_k, dropped,    k_descale,  v_descale};
  static_assert(std::size(sources) == std::size(kAppendFields));
  CommonPlace place;
  Array arrays[std::size(sources)];  // keep the memory until the call is over
  bool has_data = true;
  for (size_t n = 0; n < std::size(sources); ++n) {
    if (sources[n].is_none()) continue;
    const AppendField& field = kAppendFields[n];
    const bool of_scales =
        field.tensor == &tessera_append_call::k_descale || field.tensor == &tessera_append_call::v_descale;
    const bool written =
        field.written || (in_place && field.tensor == &tessera_append_call::q) || (of_scales && compute_scales);
    arrays[n] = import_array(field.name, sources[n], written ? Access::kWrite : Access::kRead, field.dtypes);
    place.join(field.name, arrays[n].place);
    call.*field.tensor = {arrays[n].layout, arrays[n].data};
    has_data = has_data && arrays[n].has_data;
  }
  if (!has_data) return check(core::validate_append(call));
  run_at(place, [&call](const tessera_device& device, const tessera_executor& executor) {
    return tessera_append(&call, &device, &executor);
  });
}

Place place_named(const std::string& name) {
  if (name == "cpu") return {};
  const std::string cuda = "cuda:", ordinal = name == "cuda" ? "0" : name.substr(std::min(name.size(), cuda.size()));
  int32_t id = -1;
  const auto [end, error] = std::from_chars(ordinal.data(), ordinal.data() + ordinal.size(), id);
  const bool is_number = error == std::errc() && end == ordinal.data() + ordinal.size() && id >= 0;
  if ((name != "cuda" && name.rfind(cuda, 0) != 0) || !is_number) {
    throw Error("name: \"" + name.substr(0, 80) + "\", accepted \"cpu\", \"cuda\" or \"cuda:<number>\"");
  }
  return {kCuda, id};
}

nb::dict device_as_dict(const std::string& name) {
  const tessera_device here = device_at(place_named(name), "name");
  nb::dict dict;
  dict["name"] = here.name;
  if (here.backend == TESSERA_BACKEND_CUDA) {
    dict["ordinal"] = here.ordinal;
    dict["arch"] = here.arch;
    dict["cores"] = here.cores;
    dict["l2_bytes"] = here.l2_bytes;
    dict["smem_bytes"] = here.smem_bytes;
    return dict;
  }
  dict["isa"] = tessera_isa_name(here.isa);
  dict["isa_limit"] = tessera_isa_name(here.isa_limit);
  dict["cores"] = here.cores;
  dict["threads"] = here.threads;
  dict["l1_bytes"] = here.l1_bytes;
  dict["l2_bytes"] = here.l2_bytes;
  return dict;
}

// Two copies of this module in one process, such as an installed package and a kernel from a hub, each have their own
// types: nanobind shares types among the modules of a domain, and the domain is this copy's address.
const char* domain_of_this_copy() {
  static const std::string domain = "tessera " + std::to_string(reinterpret_cast<uintptr_t>(&domain_of_this_copy));
  return domain.c_str();
}

}  // namespace
}  // namespace tessera::python

#undef NB_DOMAIN_STR
#define NB_DOMAIN_STR tessera::python::domain_of_this_copy()

NB_MODULE(_core, m) {
  using namespace tessera::python;
  find_main_thread();
  auto error = nb::exception<Error>(m, "Error", PyExc_ValueError);
  error.attr("__module__") = "tessera";
  error.attr("__doc__") = "A wrong argument, in one line: its name, what was given, what is accepted.";

  nb::class_<ArrayWithoutData>(m, "ArrayWithoutData")
      .def(
          "__init__",
          [](ArrayWithoutData* self, std::string dtype, std::vector<int64_t> shape, std::vector<int64_t> strides,
             int32_t device_type, int32_t device_id) {
            new (self) ArrayWithoutData{
                std::move(dtype), std::move(shape), std::move(strides), {device_type, device_id, nullptr}};
          },
          "dtype"_a, "shape"_a, "strides"_a, "device_type"_a, "device_id"_a = 0);

  const auto none = nb::none();
  const auto define = [&](const char* name, const auto& function, const char* backward_name, const auto& backward) {
    m.def(name, function, "q"_a.none(), "k"_a.none(), "v"_a.none(), "o"_a.none(), "lse"_a.none() = none, "options"_a);
    m.def(backward_name, backward, "q"_a.none(), "k"_a.none(), "v"_a.none(), "o"_a.none(), "lse"_a.none(),
          "d_o"_a.none(), "d_q"_a.none(), "d_k"_a.none(), "d_v"_a.none(), "options"_a);
  };
  define("forward", &forward<false>, "backward", &backward<false>);
  define("forward_by_heads", &forward<true>, "backward_by_heads", &backward<true>);
  m.def("plan", &plan<tessera_plan_describe>, "direction"_a, "q"_a.none(), "k"_a.none(), "v"_a.none(),
        "o"_a.none() = none, "lse"_a.none() = none, "options"_a);
  m.def("plan_json", &plan<tessera_plan_json>, "direction"_a, "q"_a.none(), "k"_a.none(), "v"_a.none(),
        "o"_a.none() = none, "lse"_a.none() = none, "options"_a);
  m.def("check", &check_call, "direction"_a, "q"_a.none(), "k"_a.none(), "v"_a.none(), "o"_a.none() = none,
        "lse"_a.none() = none, "d_o"_a.none() = none, "options"_a);
  m.def("combine", &combine, "o_parts"_a, "lse_parts"_a, "o"_a.none(), "lse"_a.none() = none,
        "lse_low_parts"_a.none() = none, "lse_low"_a.none() = none);
  m.def("append", &append, "k"_a, "v"_a, "k_cache"_a, "v_cache"_a, "seqused_k"_a, nb::kw_only(), "cu_seqlens"_a = none,
        "page_table"_a = none, "q"_a = none, "q_out"_a = none, "cos"_a = none, "sin"_a = none, "positions_q"_a = none,
        "positions_k"_a = none, "dropped"_a = none, "k_descale"_a = none, "v_descale"_a = none, "interleaved"_a = false,
        "compute_scales"_a = false);
  m.def("option_fields", &option_fields);
  m.def("kernel_names", &kernel_names);
  m.def("device", &device_as_dict, "name"_a = "cpu");
  add_comparison_table(m);
  add_program(m);
  add_ranks(m);
  add_score(m);
  add_jax(m);
  m.attr("version") = tessera_version();
}
