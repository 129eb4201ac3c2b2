// tessera plan: the plan for given sizes, as text.
#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "commands.hpp"
#include "error.hpp"
#include "extents.hpp"
#include "options.hpp"
#include "peers/ceilings.hpp"
#include "plan_ranks.hpp"
#include "score_options.hpp"
#include "sized_problem.hpp"

namespace tessera::cli {
namespace {

struct PlanOptions {
  ProblemSizes sizes;
  std::string dtype = "float32", dtype_kv, direction = "forward";
  bool json = false;
  AttentionOptions attention;
  ScoreOptions score;
  DeviceOptions device;
  RankOptions ranks;
};

// True for the optional tensors that a flag adds: all but the page table, which --page-size adds, and the lengths of
// prefixes, which their groups add.
bool has_flag(const core::TensorField& field) {
  for (const core::TensorName name : {core::TensorName("page_table"), core::TensorName("page_indptr"),
                                      core::TensorName("page_indices"), core::TensorName("prefix_lens")}) {
    if (&field == &core::kTensorFields[name.index]) return false;
  }
  if (core::of_several_calls(field)) return false;
  return core::is_option(field) || (field.need == core::Need::kBackward && core::takes_part(field, false));
}

ProblemSizes sizes_of(const PlanOptions& o) {
  ProblemSizes sizes = o.sizes;
  sizes.dtype = parse_input_dtype(o.dtype);
  if (!o.dtype_kv.empty()) sizes.kv_dtype = parse_cache_dtype(o.dtype_kv);
  if (o.direction != "forward" && o.direction != "backward") {
    throw WrongUse(fmt::format("--direction: '{}', accepted forward and backward", o.direction));
  }
  sizes.direction = o.direction == "backward" ? TESSERA_BACKWARD : TESSERA_FORWARD;
  for (const core::TensorField& field : core::kTensorFields) {
    if (sizes[field] && !core::takes_part(field, sizes.direction == TESSERA_BACKWARD)) {
      throw WrongUse(fmt::format("{}: given without --direction backward", field.flag));
    }
    const core::TensorField* primal = core::primal_of(field);
    if (sizes[field] && primal != nullptr && !sizes[*primal]) {
      throw WrongUse(fmt::format("{}: given without {}", field.flag, primal->flag));
    }
  }
  return sizes;
}

tessera_problem problem_of(const PlanOptions& o) {
  return problem_of(sizes_of(o), [&o](tessera_problem& problem) { o.attention.apply(problem); });
}

template <typename Writer>
std::string text_of(const tessera_plan& plan, Writer write) {
  std::string text(write(&plan, nullptr, 0), '\0');
  write(&plan, text.data(), text.size() + 1);
  return text;
}

// The plan's place under this machine's measured roofline: the lower of its arithmetic peak and its intensity times the
// memory's read bandwidth (Williams, Waterman and Patterson, 2009).
struct Roofline {
  double peak_gflops, read_gbps;  // GFLOP/s, GB/s (10^9)
  double intensity, ridge;        // FLOP a byte: of the plan, and at the roof's corner

  bool memory_bound() const { return intensity < ridge; }
  double limit_gflops() const { return memory_bound() ? intensity * read_gbps : peak_gflops; }
};

Roofline measure_roofline(const tessera_plan& plan) {
  constexpr std::int64_t kBeyondCaches_bytes = std::int64_t{128} << 20;
  const auto dtype = static_cast<tessera_dtype>(plan.problem.q.dtype);
  const double peak = peers::peak_gflops(dtype, static_cast<tessera_isa>(plan.device.isa), plan.device.threads);
  const double read = peers::read_gbps(kBeyondCaches_bytes, plan.device.threads);
  return {peak, read, plan.flops / plan.bytes_moved, peak / read};
}

std::string describe(const tessera_plan& plan, const Roofline& roof) {
  return fmt::format(
      "roofline   measured here: {:.0f} GFLOP/s, {:.1f} GB/s, which meet at {:.1f} FLOP a byte\n"
      "           {:.1f} FLOP a byte: bound by {}, at most {:.0f} GFLOP/s, {:.3g} ms\n",
      roof.peak_gflops, roof.read_gbps, roof.ridge, roof.intensity, roof.memory_bound() ? "memory" : "arithmetic",
      roof.limit_gflops(), plan.flops / roof.limit_gflops() * 1e-6);
}

int show_plan(const PlanOptions& options) {
  if (options.ranks.asked()) return show_ranks(options.ranks, sizes_of(options), problem_of(options), options.json);
  const tessera_device device = options.device.device();
  tessera_problem problem = problem_of(options);
  const std::shared_ptr<ScoreProgram> program = options.score.program(true);
  if (program) {
    if (problem.direction == TESSERA_BACKWARD) program->ask_for_gradients();
    program->describe(problem);
  }
  tessera_plan plan{};
  check_status(tessera_make_plan(&problem, &device, &plan));
  const std::string text = text_of(plan, options.json ? tessera_plan_json : tessera_plan_describe);
  const bool has_roof =
      plan.device.backend == TESSERA_BACKEND_CPU && plan.flops > 0 && plan.kernel != TESSERA_KERNEL_REFERENCE;
  if (options.json) {
    nlohmann::json json = nlohmann::json::parse(text);
    if (has_roof) {
      const Roofline roof = measure_roofline(plan);
      json["roofline"] = {{"peak_gflops", roof.peak_gflops},
                          {"read_gbps", roof.read_gbps},
                          {"intensity", roof.intensity},
                          {"ridge", roof.ridge},
                          {"limit_gflops", roof.limit_gflops()}};
    }
    fmt::print("{}\n", json.dump(2));
    return 0;
  }
  fmt::print("{}{}", text, text.ends_with('\n') ? "" : "\n");
  if (has_roof) fmt::print("{}", describe(plan, measure_roofline(plan)));
  return 0;
}

constexpr const char* kFooter = R"(Examples:
  tessera plan --sq 4096 -H 32 --kv-heads 8 -D 128 --causal
  tessera plan --sq 1 --sk 32768 -H 32 --kv-heads 8 -D 128 --dtype bfloat16 --page-size 64
  tessera plan --sq 2048 -H 16 -D 64 --direction backward --bias --dbias --json
  tessera plan --sq 4096 -H 32 -D 128 --dtype bfloat16 --arch 90
  tessera plan --sq 4096 -H 8 --mask-mod "j <= q_pos && doc[b, i] == doc[b, j]" --bind doc=int32[1,4096]
  tessera plan --sq 131072 -H 32 --kv-heads 8 -D 128 --dtype bfloat16 --causal --ranks 8)";

}  // namespace

void add_plan(CLI::App& program, Outcome& outcome) {
  CLI::App* command = program.add_subcommand("plan", "Which kernel would be chosen for given sizes, and why");
  auto options = std::make_shared<PlanOptions>();
  PlanOptions& o = *options;
  command->add_option("-B,--batch", o.sizes.batch, "Sequences")->check(kInteger)->capture_default_str();
  command->add_option("--sq", o.sizes.seqlen_q, "Queries of a sequence")->check(kInteger);
  command->add_option("--sk", o.sizes.seqlen_k, "Keys of a sequence (default: --sq)")->check(kInteger);
  command->add_option("-H,--heads", o.sizes.heads_q, "Query heads")->check(kInteger)->capture_default_str();
  command->add_option("--kv-heads", o.sizes.heads_kv, "Key and value heads (default: -H)")->check(kInteger);
  command->add_option("-D,--head-dim", o.sizes.head_dim, "Head size of queries and keys")
      ->check(kInteger)
      ->capture_default_str();
  command->add_option("--dv", o.sizes.head_dim_v, "Head size of values (default: -D)")->check(kInteger);
  command->add_option("--dtype", o.dtype, "float32, float16, bfloat16, float64, float8_e4m3 or float8_e5m2")
      ->capture_default_str();
  command->add_option("--dtype-kv", o.dtype_kv,
                      "Of an 8-bit cache: float8_e4m3, float8_e5m2 or int8 (default: --dtype)");
  command->add_option("--direction", o.direction, "forward or backward")->capture_default_str();
  command->add_flag("--packed", o.sizes.packed, "Sequences lie one after another, with cu_seqlens");
  command->add_option("--page-size", o.sizes.page_size, "Keys and values lie in pages of this many rows")
      ->check(kInteger);
  for (const core::TensorField& field : core::kTensorFields) {
    if (!has_flag(field)) continue;
    command->add_flag(field.flag, o.sizes[field],
                      fmt::format("With {} {}: {}", field.name, shape_symbols(field), field.what));
  }
  command->add_flag("--json", o.json, "As JSON");
  o.attention.add_to(*command);
  o.score.add_to(*command);
  o.device.add_place_to(*command);
  o.device.add_arch_to(*command);
  o.device.add_to(*command);
  o.ranks.add_to(*command);
  command->footer(kFooter);
  command->callback([options, command, &outcome] {
    if (command->count("--sq") + command->count("--lengths") == 0) throw CLI::RequiredError("--sq");
    if (!options->ranks.asked()) options->ranks.refuse_without_ranks(*command);
    outcome.exit_code = show_plan(*options);
  });
}

}  // namespace tessera::cli
