// The kernels that plans for the CPU choose from.
#include <algorithm>

#include "core/reference.hpp"
#include "core/status.hpp"
#include "cpu/cpu.hpp"
#include "cpu/run.hpp"

namespace tessera::cpu {
namespace {

void run_tiled(const tessera_plan& plan, const tessera_buffers& buffers, const core::score::Bound* bound,
               void* workspace, const tessera_executor& executor, core::Cancel& cancel) {
  (plan.problem.direction == TESSERA_BACKWARD ? backward : forward)(plan, buffers, bound, workspace, executor, cancel);
}

std::string refuse_reference(const tessera_plan& plan) {
  const bool asked_for = core::asked_family(plan.device) == "reference" || plan.problem.q.dtype == TESSERA_FLOAT64;
  return asked_for ? "" : "float64, on one core: on request, or where a problem is float64";
}

// A core's rates: GFLOP/s of products for each instruction set, and GB/s of keys and values. Round numbers from the
// machines of docs/reference/kernels/cpu.md; NEON's are not measured, but two multiply-adds a cycle at 2.5 GHz and 3/4
// of that (docs/reference/kernels/cpu.md#aarch64).
constexpr double kGflopsOfIsa[] = {10, 60, 150, 200, 1000, 30, 60};
constexpr double kGigabytesPerSecond = 10;

double rate_us(const tessera_plan& plan, double flops, double passes) {
  const tessera_problem& p = plan.problem;
  const double keys = static_cast<double>(plan.batch * plan.max_seqlen_k * plan.heads_kv);
  const double bytes =
      keys * static_cast<double>(plan.head_dim + plan.head_dim_v) * static_cast<double>(tessera_dtype_bytes(p.k.dtype));
  const double read_us = bytes * 1e-3 / kGigabytesPerSecond;
  const double products_us = flops * 1e-3 / kGflopsOfIsa[plan.device.isa];
  return (std::max(products_us, read_us) + (passes - 1) * read_us) / plan.device.cores;
}

// Keys and values are read once.
double estimate_decode_us(const tessera_plan& plan) { return rate_us(plan, plan.flops, 1); }

// The keys and values are packed first. A tile of few rows takes as long as a full one.
double estimate_tiled_us(const tessera_plan& plan) {
  constexpr double kTileRows = 16;
  const double rows = static_cast<double>(plan.max_seqlen_q * (plan.heads_q / std::max<int64_t>(1, plan.heads_kv)));
  const double padded = rows > 0 ? std::max(1.0, kTileRows / rows) : 1.0;
  return rate_us(plan, plan.flops * padded, 2);
}

double estimate_shared_prefix_us(const tessera_plan& plan) { return estimate_tiled_us(plan); }

// On one core, in float64.
double estimate_reference_us(const tessera_plan& plan) {
  constexpr double kGflops = 1;
  return plan.flops * 1e-3 / kGflops;
}

void configure_reference(tessera_plan& plan) {
  tessera_plan_step& step = core::add_step(plan, *find_kernel("reference"));
  step.block_m = 1, step.block_n = static_cast<int32_t>(plan.max_seqlen_k);
  step.num_items = own_of(step).tiles_per_item = 1;
  step.workspace_bytes = core::reference_workspace_bytes(plan);
}

// On the calling thread.
void run_reference(const tessera_plan& plan, const tessera_buffers& buffers, const core::score::Bound* bound,
                   void* workspace, const tessera_executor& /*executor*/, core::Cancel& cancel) {
  const bool backward = plan.problem.direction == TESSERA_BACKWARD;
  (backward ? core::reference_backward : core::reference_forward)(plan, buffers, bound, workspace, cancel);
}

constexpr Kernel kKernels[] = {
    {{"decode", TESSERA_KERNEL_DECODE, refuse_decode, configure_decode, estimate_decode_us}, forward},
    {{"tiled", TESSERA_KERNEL_TILED, refuse_tiled, configure_tiled, estimate_tiled_us}, run_tiled},
    {{"shared_prefix", TESSERA_KERNEL_SHARED_PREFIX, refuse_shared_prefix, configure_shared_prefix,
      estimate_shared_prefix_us},
     forward_shared_prefix},
    {{"reference", TESSERA_KERNEL_REFERENCE, refuse_reference, configure_reference, estimate_reference_us},
     run_reference},
};

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }

const Kernel* find_kernel(std::string_view name) {
  const auto found = std::ranges::find_if(kKernels, [name](const Kernel& kernel) { return kernel.name == name; });
  return found == std::end(kKernels) ? nullptr : found;
}

tessera_status run(const tessera_plan& plan, const tessera_buffers& buffers, const core::score::Bound* bound,
                   void* workspace, const tessera_executor& executor, core::Cancel& cancel) {
  const Kernel* const found = find_kernel(plan.family);
  if (!found) return invalid("plan: family '%.31s', accepted what tessera_make_plan fills in", plan.family);
  found->run(plan, buffers, bound, workspace, executor, cancel);
  return ok();
}

}  // namespace tessera::cpu
