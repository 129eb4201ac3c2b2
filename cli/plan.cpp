// tessera plan: what would be done for given sizes, in words.
#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "commands.hpp"
#include "error.hpp"
#include "options.hpp"
#include "peers/ceilings.hpp"
#include "tensor.hpp"

namespace tessera::cli {
namespace {

struct PlanOptions {
  std::int64_t batch = 1, seqlen_q = 0, heads_q = 8, head_dim = 64;
  std::optional<std::int64_t> seqlen_k, heads_kv, head_dim_v, page_size;
  std::string dtype = "float32", direction = "forward";
  bool packed = false, bias = false, mask = false, block_mask = false, alibi = false, sink = false;
  bool lse = false, dbias = false, dsink = false, json = false;
  AttentionOptions attention;
  DeviceOptions device;
};

tessera_layout layout_of(tessera_dtype dtype, const Shape& shape, const char* flag) {
  checked_bytes(shape, static_cast<std::int64_t>(tessera_dtype_bytes(dtype)), flag);
  tessera_layout layout{};
  layout.dtype = dtype;
  layout.rank = static_cast<std::int32_t>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    layout.shape[axis] = shape[axis];
    layout.strides[axis] = stride;
    stride *= std::max<std::int64_t>(shape[axis], 1);
  }
  return layout;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

void require(bool holds, const char* flag, std::int64_t given, const char* accepted) {
  if (!holds) throw WrongUse(fmt::format("{}: {}, accepted {}", flag, given, accepted));
}

tessera_problem problem_of(const PlanOptions& o) {
  const tessera_dtype dtype = parse_dtype(o.dtype);
  const std::int64_t b = o.batch, sq = o.seqlen_q, sk = o.seqlen_k.value_or(sq), hq = o.heads_q;
  const std::int64_t hkv = o.heads_kv.value_or(hq), d = o.head_dim, dv = o.head_dim_v.value_or(d);
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  const std::pair<const char*, std::int64_t> sizes[] = {{"-B", b},           {"--sq", sq}, {"--sk", sk}, {"-H", hq},
                                                        {"--kv-heads", hkv}, {"-D", d},    {"--dv", dv}};
  for (const auto& [flag, size] : sizes) require(size >= 0 && size < kMost, flag, size, "0 .. 2^31 - 1");
  if (o.direction != "forward" && o.direction != "backward") {
    throw WrongUse(fmt::format("--direction: '{}', accepted forward and backward", o.direction));
  }

  tessera_problem problem;
  tessera_problem_init(&problem);
  problem.direction = o.direction == "backward" ? TESSERA_BACKWARD : TESSERA_FORWARD;
  const bool backward = problem.direction == TESSERA_BACKWARD;
  const auto queries = [&](std::int64_t width, const char* flag) {
    return o.packed ? layout_of(dtype, {b * sq, hq, width}, flag) : layout_of(dtype, {b, sq, hq, width}, flag);
  };
  const auto keys = [&](std::int64_t width, const char* flag) {
    if (o.page_size) return layout_of(dtype, {b * ceil_div(sk, *o.page_size), *o.page_size, hkv, width}, flag);
    return o.packed ? layout_of(dtype, {b * sk, hkv, width}, flag) : layout_of(dtype, {b, sk, hkv, width}, flag);
  };
  if (o.page_size) {
    require(*o.page_size > 0 && *o.page_size < kMost, "--page-size", *o.page_size, "at least 1");
    problem.page_table = layout_of(TESSERA_INT32, {b, ceil_div(sk, *o.page_size)}, "--page-size");
    problem.seqused_k = layout_of(TESSERA_INT32, {b}, "-B");
  }
  if (o.packed) {
    problem.cu_seqlens_q = layout_of(TESSERA_INT32, {b + 1}, "-B");
    if (!o.page_size) problem.cu_seqlens_k = problem.cu_seqlens_q;
  }
  if (o.packed || o.page_size) {
    problem.max_seqlen_q = sq;
    problem.max_seqlen_k = sk;
  }
  problem.q = queries(d, "-D");
  problem.k = keys(d, "-D");
  problem.v = keys(dv, "--dv");
  problem.o = queries(dv, "--dv");
  if (o.lse || backward) {
    problem.lse =
        o.packed ? layout_of(TESSERA_FLOAT32, {hq, b * sq}, "--lse") : layout_of(TESSERA_FLOAT32, {b, hq, sq}, "--lse");
  }
  if (o.bias) problem.bias = layout_of(TESSERA_FLOAT32, {1, hq, sq, sk}, "--bias");
  if (o.mask) problem.mask = layout_of(TESSERA_BOOL, {1, 1, sq, sk}, "--mask");
  if (o.alibi) problem.alibi_slopes = layout_of(TESSERA_FLOAT32, {hq}, "--alibi");
  if (o.sink) problem.sink = layout_of(TESSERA_FLOAT32, {hq}, "--sink");
  if (o.block_mask) {
    if (o.attention.mask_block.size() != 2 || o.attention.mask_block[0] < 1 || o.attention.mask_block[1] < 1) {
      throw WrongUse("--block-mask: needs --mask-block with two numbers of at least 1");
    }
    problem.block_mask = layout_of(
        TESSERA_BOOL, {1, 1, ceil_div(sq, o.attention.mask_block[0]), ceil_div(sk, o.attention.mask_block[1])},
        "--block-mask");
  }
  if (backward) {
    problem.d_o = problem.o;
    problem.d_q = problem.q;
    problem.d_k = problem.k;
    problem.d_v = problem.v;
  }
  if (o.dbias) problem.d_bias = problem.bias;
  if (o.dsink) problem.d_sink = problem.sink;
  o.attention.apply(problem);
  return problem;
}

template <typename Writer>
std::string text_of(const tessera_plan& plan, Writer write) {
  std::string text(write(&plan, nullptr, 0), '\0');
  write(&plan, text.data(), text.size() + 1);
  return text;
}

// Where the plan lands under this machine's measured roofline: the lower of its arithmetic peak and its intensity times the
// memory's read bandwidth (Williams, Waterman and Patterson, 2009).
struct Roofline {
  double peak_gflops, read_gbps;  // GFLOP/s, GB/s (10^9)
  double intensity, ridge;        // FLOP a byte: of the plan, and where the roof turns

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
  const tessera_device device = options.device.device();
  const tessera_problem problem = problem_of(options);
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
  tessera plan --sq 4096 -H 32 -D 128 --dtype bfloat16 --arch 90)";

}  // namespace

void add_plan(CLI::App& program, Outcome& outcome) {
  CLI::App* command = program.add_subcommand("plan", "Which kernel would be chosen for given sizes, and why");
  auto options = std::make_shared<PlanOptions>();
  PlanOptions& o = *options;
  command->add_option("-B,--batch", o.batch, "Sequences")->check(kInteger)->capture_default_str();
  command->add_option("--sq", o.seqlen_q, "Queries of a sequence")->check(kInteger)->required();
  command->add_option("--sk", o.seqlen_k, "Keys of a sequence (default: --sq)")->check(kInteger);
  command->add_option("-H,--heads", o.heads_q, "Query heads")->check(kInteger)->capture_default_str();
  command->add_option("--kv-heads", o.heads_kv, "Key and value heads (default: -H)")->check(kInteger);
  command->add_option("-D,--head-dim", o.head_dim, "Head size of queries and keys")
      ->check(kInteger)
      ->capture_default_str();
  command->add_option("--dv", o.head_dim_v, "Head size of values (default: -D)")->check(kInteger);
  command->add_option("--dtype", o.dtype, "float32, float16, bfloat16 or float64")->capture_default_str();
  command->add_option("--direction", o.direction, "forward or backward")->capture_default_str();
  command->add_flag("--packed", o.packed, "Sequences lie one after another, with cu_seqlens");
  command->add_option("--page-size", o.page_size, "Keys and values lie in pages of this many rows")->check(kInteger);
  command->add_flag("--lse", o.lse, "The log-sum-exp is wanted");
  command->add_flag("--bias", o.bias, "With a bias [1, Hq, Sq, Sk]");
  command->add_flag("--mask", o.mask, "With a mask [1, 1, Sq, Sk]");
  command->add_flag("--block-mask", o.block_mask, "With a block mask, see --mask-block");
  command->add_flag("--alibi", o.alibi, "With ALiBi slopes [Hq]");
  command->add_flag("--sink", o.sink, "With a sink [Hq]");
  command->add_flag("--dbias", o.dbias, "The gradient of the bias is wanted");
  command->add_flag("--dsink", o.dsink, "The gradient of the sink is wanted");
  command->add_flag("--json", o.json, "As JSON");
  o.attention.add_to(*command);
  o.device.add_place_to(*command);
  o.device.add_arch_to(*command);
  o.device.add_to(*command);
  command->footer(kFooter);
  command->callback([options, &outcome] { outcome.exit_code = show_plan(*options); });
}

}  // namespace tessera::cli
