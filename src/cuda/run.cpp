// Operations on a whole call.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <span>

#include "core/fields.hpp"
#include "core/status.hpp"
#include "cuda/append_params.hpp"
#include "cuda/cuda.hpp"
#include "cuda/families/block_lists.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"
#include "cuda/registry.hpp"
#include "cuda/runtime/driver.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace tessera::cuda {

namespace {

// Whether the steps serve a call with data at these addresses; otherwise the stand-in does, which also clears the rows
// of a batch without sequences.
bool fits(const tessera_plan& plan, const tessera_buffers& buffers) {
  return plan.batch > 0 && std::ranges::all_of(core::steps_of(plan), [&](const tessera_plan_step& step) {
           const Family* const family = step.unaligned ? nullptr : find_family(step.family);
           return !family || !family->alignment || family->alignment->fits(plan, buffers);
         });
}

tessera_status lower_steps(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace,
                           LaunchList& launches) {
  const std::span<const tessera_plan_step> steps = core::steps_of(plan);
  const auto stand_in = std::ranges::find_if(steps, [](const tessera_plan_step& step) { return step.unaligned != 0; });
  if (stand_in != steps.end() && !fits(plan, buffers)) return lower_step(plan, *stand_in, buffers, workspace, launches);
  const Family* const family = find_family(plan.family);
  if (!family) return invalid("plan: family '%.31s', accepted what tessera_make_plan fills in", plan.family);
  if (family->lower_call) return family->lower_call(plan, buffers, workspace, launches);
  for (const tessera_plan_step& step : steps) {
    if (!step.unaligned) TESSERA_RETURN_IF_ERROR(lower_step(plan, step, buffers, workspace, launches));
  }
  return ok();
}

tessera_status lower(const tessera_plan& plan, const tessera_buffers& buffers, const core::score::Bound* bound,
                     void* workspace, LaunchList& launches) {
  if (!bound) return lower_steps(plan, buffers, workspace, launches);
  KernelProgram program(*bound, plan.problem);
  const ProgramSums sums(plan, *bound, workspace);
  sums.enter(program.params);
  launches.use(program);
  sums.clear(plan, launches);
  TESSERA_RETURN_IF_ERROR(lower_steps(plan, buffers, workspace, launches));
  sums.write(plan, launches);
  return ok();
}

}  // namespace

tessera_status lower(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace, LaunchList& launches) {
  if (!core::score::has_program(plan)) return lower(plan, buffers, nullptr, workspace, launches);
  const core::score::Bound bound = core::score::bind(plan, &buffers);
  return lower(plan, buffers, &bound, workspace, launches);
}

tessera_status run(const tessera_plan& plan, const tessera_buffers& buffers, const core::score::Bound* bound,
                   void* workspace, void* stream) {
  Launches launches(plan.device, stream);
  TESSERA_RETURN_IF_ERROR(launches.begin());
  LaunchList list(launches.driver());
  TESSERA_RETURN_IF_ERROR(lower(plan, buffers, bound, workspace, list));
  return submit(list, launches);
}

std::vector<tessera_launch> planned_launches(const tessera_plan& plan, bool aligned) {
  constexpr uintptr_t kNotAligned = 8;
  tessera_buffers buffers{};  // only the addresses are used, not the data
  for (const core::TensorField& field : core::kTensorFields) {
    if (!aligned) field.set_pointer(buffers, reinterpret_cast<const void*>(kNotAligned));
  }
  LaunchList list;
  std::vector<tessera_launch> launches;
  if (lower(plan, buffers, nullptr, list).code != TESSERA_OK) return launches;
  for (const Launch& launch : list) {
    const KernelSpec spec = launch.spec();
    const int64_t blocks = int64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
    tessera_launch& described = launches.emplace_back();
    std::snprintf(described.kernel, sizeof described.kernel, "%s", spec.name);
    std::snprintf(described.config, sizeof described.config, "%s", spec.config.c_str());
    described.blocks = blocks, described.smem_bytes = spec.smem_bytes;
    described.threads = spec.threads, described.cluster = spec.cluster;
  }
  return launches;
}

int64_t program_lists_bytes(const tessera_plan& plan) {
  LaunchList list;
  int64_t bytes = 0;
  if (!core::score::has_program(plan) || lower(plan, tessera_buffers{}, nullptr, list).code != TESSERA_OK) return 0;
  for (const Launch& launch : list) {
    if (launch.spec_of == spec_of_dq_order) {
      DqOrderParams params;
      std::memcpy(&params, launch.params, sizeof params);
      bytes += params.order.beside * int64_t{sizeof(int)};
    }
    if (launch.spec_of != spec_of_program_lists) continue;
    ProgramListsConfig config;
    ProgramListsParams params;
    std::memcpy(&config, launch.config, sizeof config), std::memcpy(&params, launch.params, sizeof params);
    bytes += program_lists_of(plan, config).bounds_bytes + params.end_word * int64_t{sizeof(int)};
  }
  return bytes;
}

// The data's addresses are unknown: these are the kernels for rows that are aligned wherever the strides allow it.
tessera_status prepare(const tessera_plan& plan) {
  LaunchList list;
  TESSERA_RETURN_IF_ERROR(lower(plan, tessera_buffers{}, nullptr, list));
  return prepare(list, plan.device);
}

tessera_status combine(const tessera_combine_call& t, const tessera_device& device, void* stream) {
  Launches launches(device, stream);
  TESSERA_RETURN_IF_ERROR(launches.begin());
  LaunchList list(launches.driver());
  TESSERA_RETURN_IF_ERROR(launch_combine(combine_config(t), combine_params(t), list));
  return submit(list, launches);
}

tessera_status append(const tessera_append_call& call, const tessera_device& device, void* stream) {
  const AppendConfig config = append_config(call);
  const AppendParams p = append_params(call, config);
  Launches launches(device, stream);
  TESSERA_RETURN_IF_ERROR(launches.begin());
  LaunchList list(launches.driver());
  TESSERA_RETURN_IF_ERROR(launch_append(config, p, list));
  return submit(list, launches);
}

}  // namespace tessera::cuda
