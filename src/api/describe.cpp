// A plan as text and as JSON.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "api/candidates.hpp"
#include "core/fields.hpp"
#include "core/geometry.hpp"
#include "core/score/bound.hpp"
#include "core/score/print.hpp"
#include "core/seal.hpp"
#include "core/shared_prefix.hpp"
#include "core/status.hpp"
#include "core/steps.hpp"
#include "core/text.hpp"
#include "core/validate.hpp"
#include "cpu/cpu.hpp"
#include "cpu/packed_keys.hpp"
#include "cpu/run.hpp"
#include "cuda/cuda.hpp"

namespace tessera::api {
using namespace core;  // the core's fields, layouts and rules
namespace {

bool on_cuda(const tessera_plan& plan) { return plan.device.backend == TESSERA_BACKEND_CUDA; }
const char* plural(int64_t count) { return count == 1 ? "" : "s"; }
double ratio(double numerator, double denominator) { return denominator > 0 ? numerator / denominator : 0; }
double extra_bytes(const tessera_plan& plan) { return static_cast<double>(plan.workspace_bytes); }

// ---- text -----------------------------------------------------------------------------------------------------------

std::string form_text(const tessera_problem& p) {
  std::string text = packed_q(p) ? "packed queries" : "dense queries";
  text += paged(p) ? ", paged keys" : packed_k(p) ? ", packed keys" : ", dense keys";
  return text;
}

std::string window_side(int64_t keys) { return keys < 0 ? "all" : print("%" PRId64, keys); }

std::string options_text(const tessera_problem& p) {
  std::string text = print("scale %.6g", p.scale);
  const auto add = [&text](const std::string& option) { text += ", " + option; };
  const char* aligned = p.alignment == TESSERA_TOP_LEFT ? "top-left" : "bottom-right";
  if (p.causal) add(print("causal (%s)", aligned));
  if (p.window_left >= 0 || p.window_right >= 0) {
    add(print("window %s left, %s right (%s)", window_side(p.window_left).c_str(), window_side(p.window_right).c_str(),
              aligned));
  }
  if (p.softcap > 0) add(print("softcap %g", p.softcap));
  if (p.dropout_p > 0) add(print("dropout %g", p.dropout_p));
  for (const TensorField& field : kTensorFields) {
    if (!field.words || !present(p.*field.layout)) continue;
    const bool blocks = field.layout == &tessera_problem::block_mask;
    add(blocks ? print("%s %" PRId64 " x %" PRId64, field.words, p.mask_block_q, p.mask_block_k) : field.words);
  }
  if (p.batch_invariant) add("batch invariant");
  if (p.deterministic) add("deterministic");
  return text;
}

bool is(const tessera_plan_step& step, std::string_view family) { return step.family == family; }
bool uses_dot(const tessera_plan& plan) { return !on_cuda(plan) && cpu::own_of(plan.steps[0]).use_dot; }

std::string device_text(const tessera_plan& plan) {
  const tessera_device& device = plan.device;
  if (on_cuda(plan) && device.ordinal < 0) {
    const std::string name = device.name[0] ? print(" (%s)", device.name) : "";
    return print("a GPU described by its architecture, none of this machine's: compute capability %d.%d%s, ",
                 device.arch / 10, device.arch % 10, name.c_str()) +
           print("%d multiprocessors, %s of shared memory a block", device.cores,
                 bytes_text(static_cast<double>(device.smem_bytes)).c_str());
  }
  if (on_cuda(plan)) {
    return print("GPU %d: %s, compute capability %d.%d, %d multiprocessors", device.ordinal, device.name,
                 device.arch / 10, device.arch % 10, device.cores);
  }
  const bool tiles = device.isa == TESSERA_ISA_AMX_BF16;
  const char* products = !uses_dot(plan) ? "" : tiles ? " with bf16 products by tiles" : " with bf16 dot products";
  std::string tiles_refused;
  if (device.vector_isa != 0 && device.isa == device.vector_isa) {
    tiles_refused = ", not AMX's tiles (" + cpu::refuse_tiles(plan) + ")";
  } else if (plan.problem.q.dtype == TESSERA_BFLOAT16 && cpu::refused_amx()) {
    tiles_refused = ", not AMX's tiles (the operating system refuses them to this process)";
  }
  return print("%s, %s%s%s, %d threads on %d cores", device.name, tessera_isa_name(device.isa), products,
               tiles_refused.c_str(), device.threads, device.cores);
}

std::string tiles_text(const tessera_plan& plan, const tessera_plan_step& step) {
  if (is(step, "reference")) return "none: one query at a time, in float64";
  if (on_cuda(plan)) {
    return print("%d queries x %d keys, %d warp%s, %d stage%s, %s of shared memory a block", step.block_m, step.block_n,
                 step.num_warps, plural(step.num_warps), step.num_stages, plural(step.num_stages),
                 bytes_text(static_cast<double>(step.smem_bytes)).c_str());
  }
  const int32_t tiles = cpu::own_of(step).tiles_per_item;
  if (is(step, "decode")) {
    return print("%d query rows of a KV head x %d keys, %d KV head%s a pass over the keys", step.block_m, step.block_n,
                 tiles, plural(tiles));
  }
  return print("%d queries x %d keys, %d query tile%s a pass over the keys", step.block_m, step.block_n, tiles,
               plural(tiles));
}

// An estimate: "14 us", "2.3 ms".
std::string time_text(double us) {
  if (us >= 1e6) return print("%.2g s", us * 1e-6);
  return us >= 1e3 ? print(us >= 1e4 ? "%.0f ms" : "%.1f ms", us * 1e-3) : print("%.0f us", us);
}

std::string launch_text(const tessera_launch& launch) {
  const std::string cluster = launch.cluster > 1 ? print(" in clusters of %d", launch.cluster) : "";
  const std::string memory = bytes_text(static_cast<double>(launch.smem_bytes));
  return print("%s, %" PRId64 " block%s of %d threads%s", launch.kernel, launch.blocks, plural(launch.blocks),
               launch.threads, cluster.c_str()) +
         (launch.smem_bytes > 0 ? ", " + memory + " of shared memory" : "");
}

constexpr const char* kKeys[] = {"", "prefixes", "other keys"};
constexpr const char* kSequences[] = {"", "few queries", "many queries"};

// The sequences that another kernel serves in a plan for many rows.
std::string decoded_text(const tessera_plan& plan, const tessera_plan_step& step) {
  const std::string text = print("sequences of at most %d quer%s by %s", step.most_queries,
                                 step.most_queries == 1 ? "y" : "ies", step.family);
  if (on_cuda(plan)) return text + ", in a launch of its own";
  const cpu::CpuStep& own = cpu::own_of(step);
  return text + print(": %d KV head%s a pass over the keys, at most %" PRId64 " parts in all", own.tiles_per_item,
                      plural(own.tiles_per_item), own.parts);
}

std::string items_text(const tessera_plan& plan, const tessera_plan_step& step) {
  const tessera_problem& p = plan.problem;
  const bool decode = is(step, "decode");
  const bool at_most = decode || packed_q(p) || packed_k(p);
  const bool of_groups = p.direction == TESSERA_BACKWARD && step.num_splits > 1;
  return print("%" PRId64 " work items%s, %s%s in %d part%s%s", step.num_items, at_most ? " at most" : "",
               of_groups ? "the query heads of a KV head" : "keys", decode ? " of a sequence" : "", step.num_splits,
               plural(step.num_splits), decode ? " at most" : "");
}

std::string workspace_text(const tessera_plan& plan) {
  const std::string total = bytes_text(extra_bytes(plan));
  if (on_cuda(plan)) return total + " of the GPU's memory";
  const int64_t packed = cpu::packed_keys_bytes(plan);
  const std::string once =
      packed > 0 ? ", " + bytes_text(static_cast<double>(packed)) + " of it keys and values packed once" : "";
  return print("%s: %s a thread x %d, %s shared%s", total.c_str(),
               bytes_text(static_cast<double>(plan.scratch_bytes)).c_str(), plan.device.threads,
               bytes_text(static_cast<double>(plan.shared_bytes)).c_str(), once.c_str());
}

// A score program as text.
struct ProgramTexts {
  std::string score, mask;                   // "": none
  std::vector<std::string> gradient, names;  // one line each
};

ProgramTexts program_texts(const tessera_plan& plan) {
  const score::Bound bound = score::bind(plan);
  const score::Program& program = bound.program();
  ProgramTexts texts;
  if (program.score >= 0) texts.score = score::to_text(program, program.score);
  if (program.mask >= 0) texts.mask = score::to_text(program, program.mask);
  std::istringstream gradient(score::gradient_text(*bound.checked));
  for (std::string each; std::getline(gradient, each);) texts.gradient.push_back(each);
  for (size_t n = 0; n < program.tensors.size(); ++n) {
    const score::BoundTensor& tensor = bound.tensors[n];
    std::string shape;
    for (int axis = 0; axis < tensor.rank; ++axis) {
      shape += (axis > 0 ? ", " : "") + std::to_string(tensor.shape[static_cast<size_t>(axis)]);
    }
    texts.names.push_back(program.tensors[n].text + " " + tessera_dtype_name(tensor.dtype) + " [" + shape + "]" +
                          (bound.gradients[n].needed ? ", with its gradient" : ""));
  }
  for (const score::Name& scalar : program.scalars) {
    texts.names.push_back(scalar.text + ", a scalar: " + score::kTypeNames[static_cast<int>(scalar.type)]);
  }
  return texts;
}

std::string describe(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  const bool backward = p.direction == TESSERA_BACKWARD;
  std::string text;
  const auto line = [&text](const char* label, const std::string& value) {
    text += print("%-10s ", label) + value + "\n";
  };
  const auto more = [&line](const std::string& value) { line("", value); };

  line("problem",
       print("%s, %s, %s", backward ? "backward" : "forward", tessera_dtype_name(p.q.dtype), form_text(p).c_str()));
  more(print("batch %" PRId64 ", Sq %s%" PRId64 ", Sk %s%" PRId64 ", heads %" PRId64 " over %" PRId64
             ", head size %" PRId64 " (values %" PRId64 ")",
             plan.batch, packed_q(p) ? "at most " : "", plan.max_seqlen_q, packed_k(p) || paged(p) ? "at most " : "",
             plan.max_seqlen_k, plan.heads_q, plan.heads_kv, plan.head_dim, plan.head_dim_v));
  more(options_text(p));
  if (score::has_program(plan)) {
    const ProgramTexts texts = program_texts(plan);
    if (!texts.score.empty()) line("score", texts.score);
    if (!texts.mask.empty()) line("mask", texts.mask);
    for (const std::string& each : texts.gradient) line(&each == &texts.gradient[0] ? "gradient" : "", each);
    for (const std::string& each : texts.names) line(&each == &texts.names[0] ? "names" : "", each);
  }
  line("device", device_text(plan));
  line("kernel", plan.family);
  for (const tessera_candidate& candidate : answers(plan)) {
    const bool chosen = std::strcmp(candidate.kernel, plan.family) == 0;
    const std::string answer = candidate.accepted ? time_text(candidate.estimate_us) + ", " : "refused: ";
    more(print("%c %-13s %s%s", chosen ? '*' : '-', candidate.kernel, answer.c_str(), candidate.reason));
  }
  for (const tessera_plan_step& step : steps_of(plan)) {
    if (step.unaligned) continue;  // its launches tell
    if (step.sequences == TESSERA_STEP_FEW_QUERIES) {
      more(decoded_text(plan, step));
      continue;
    }
    const bool is_part = step.keys != TESSERA_STEP_ALL_KEYS;
    const std::string what = is_part ? print("%s, by %s: ", kKeys[step.keys], step.family) : "";
    line(&step == plan.steps ? "tiles" : "", what + tiles_text(plan, step));
    if (!is(step, "reference")) more(items_text(plan, step));
  }
  if (on_cuda(plan)) {
    const auto aligned = cuda::planned_launches(plan, true), elsewhere = cuda::planned_launches(plan, false);
    line("launches", aligned.empty() ? "none" : launch_text(aligned[0]));
    for (size_t i = 1; i < aligned.size(); ++i) more(launch_text(aligned[i]));
    const auto same = [](const tessera_launch& a, const tessera_launch& b) {
      return std::memcmp(&a, &b, sizeof a) == 0;
    };
    if (!std::ranges::equal(aligned, elsewhere, same)) {
      std::vector<std::string> texts[2];
      for (const auto& launch : aligned) texts[0].push_back(launch_text(launch));
      for (const auto& launch : elsewhere) texts[1].push_back(launch_text(launch));
      const bool alike = texts[0] == texts[1];
      more(std::string("where data is not aligned to 16 bytes:") + (alike ? " the same by narrower loads" : ""));
      for (const std::string& one : texts[1]) {
        if (!alike) more("  " + one);
      }
    }
  }
  line("workspace", workspace_text(plan));
  if (const int64_t bytes = on_cuda(plan) ? cuda::program_lists_bytes(plan) : 0; bytes > 0) {
    more(bytes_text(static_cast<double>(bytes)) + " of it lists of the blocks that the mask shows, made by the GPU");
  }
  more(print("standard attention holds %s for the score matrix", bytes_text(plan.standard_extra_bytes).c_str()));
  const char* at_most = plan.lengths_are_data ? "at most " : "";
  line("work", print("%s%s on the visible area", at_most, flops_text(plan.flops).c_str()));
  line("traffic", print("%s%s, standard attention %s (%.1f x)", at_most, bytes_text(plan.bytes_moved).c_str(),
                        bytes_text(plan.standard_bytes).c_str(), ratio(plan.standard_bytes, plan.bytes_moved)));
  line("intensity", print("%.1f FLOP a byte, standard attention %.1f", ratio(plan.flops, plan.bytes_moved),
                          ratio(plan.flops, plan.standard_bytes)));
  return text;
}

// ---- JSON -----------------------------------------------------------------------------------------------------------

void add_layout(JsonWriter& json, const char* name, const tessera_layout& layout) {
  if (!present(layout)) return;
  json.open(name, '{');
  json.add("dtype", tessera_dtype_name(layout.dtype));
  json.open("shape", '[');
  for (int axis = 0; axis < layout.rank; ++axis) json.add(nullptr, layout.shape[axis]);
  json.close(']');
  json.open("strides", '[');
  for (int axis = 0; axis < layout.rank; ++axis) json.add(nullptr, layout.strides[axis]);
  json.close(']');
  json.close('}');
}

void add_option(JsonWriter& json, OptionKind kind, const OptionMember& member, const tessera_problem& p) {
  if (kind == OptionKind::kAlignment) {
    json.add(member.name, p.*member.flag == TESSERA_TOP_LEFT ? "top_left" : "bottom_right");
  } else if (member.flag) {
    json.add(member.name, p.*member.flag != 0);
  } else if (member.integer) {
    json.add(member.name, p.*member.integer);
  } else if (member.unsigned_integer) {
    json.add(member.name, p.*member.unsigned_integer);
  } else {
    json.add(member.name, p.*member.number);
  }
}

void add_problem(JsonWriter& json, const tessera_problem& p) {
  json.open("problem", '{');
  json.add("direction", p.direction == TESSERA_BACKWARD ? "backward" : "forward");
  json.open("tensors", '{');
  for (const TensorField& field : kTensorFields) add_layout(json, field.name, p.*field.layout);
  json.close('}');
  for (const OptionField& option : kOptionFields) {
    for (const OptionMember& member : option.members) {
      if (member.name) add_option(json, option.kind, member, p);
    }
  }
  json.close('}');
}

void add_launches(JsonWriter& json, const char* key, const std::vector<tessera_launch>& launches) {
  json.open(key, '[');
  for (const tessera_launch& launch : launches) {
    json.open(nullptr, '{');
    json.add("kernel", launch.kernel);
    json.add("config", launch.config);
    json.add("blocks", launch.blocks);
    json.add("threads", launch.threads);
    json.add("cluster", launch.cluster);
    json.add("smem_bytes", launch.smem_bytes);
    json.close('}');
  }
  json.close(']');
}

void add_steps(JsonWriter& json, const tessera_plan& plan) {
  json.open("steps", '[');
  for (const tessera_plan_step& step : steps_of(plan)) {
    json.open(nullptr, '{');
    json.add("kernel", step.family);
    if (step.keys != TESSERA_STEP_ALL_KEYS) json.add("keys", kKeys[step.keys]);
    if (step.sequences != TESSERA_STEP_ALL_SEQUENCES) json.add("sequences", kSequences[step.sequences]);
    const struct {
      const char* name;
      int64_t value;
    } counts[] = {
        {"block_m", step.block_m},
        {"block_n", step.block_n},
        {"num_splits", step.num_splits},
        {"num_items", step.num_items},
        {"most_queries", step.most_queries},
        {"workspace_at", step.workspace_at},
        {"workspace_bytes", step.workspace_bytes},
    };
    for (const auto& [name, value] : counts) json.add(name, value);
    if (on_cuda(plan)) {
      json.add("unaligned", step.unaligned != 0);
      json.add("num_warps", int64_t{step.num_warps});
      json.add("num_stages", int64_t{step.num_stages});
      json.add("smem_bytes", step.smem_bytes);
    } else {
      const cpu::CpuStep& own = cpu::own_of(step);
      json.add("isa", tessera_isa_name(step.isa));
      json.add("tiles_per_item", int64_t{own.tiles_per_item});
      json.add("use_dot", own.use_dot != 0);
      json.add("parts", own.parts);
    }
    json.close('}');
  }
  json.close(']');
}

std::string to_json(const tessera_plan& plan) {
  JsonWriter json;
  json.open(nullptr, '{');
  json.add("version", tessera_version());
  json.add("kernel", plan.family);
  if (score::has_program(plan)) {
    const ProgramTexts texts = program_texts(plan);
    json.open("program", '{');
    json.add("score", texts.score.c_str());
    json.add("mask", texts.mask.c_str());
    const auto add_lines = [&json](const char* name, const std::vector<std::string>& lines) {
      json.open(name, '[');
      for (const std::string& each : lines) json.add(nullptr, each.c_str());
      json.close(']');
    };
    add_lines("gradient", texts.gradient);
    add_lines("names", texts.names);
    json.add("hash", print("%016" PRIx64, plan.program.hash).c_str());
    json.close('}');
  }
  json.open("candidates", '[');
  for (const tessera_candidate& candidate : answers(plan)) {
    json.open(nullptr, '{');
    json.add("kernel", candidate.kernel);
    json.add("accepted", candidate.accepted != 0);
    if (candidate.accepted) json.add("estimate_us", candidate.estimate_us);
    json.add("reason", candidate.reason);
    json.close('}');
  }
  json.close(']');
  if (on_cuda(plan)) {
    add_launches(json, "launches", cuda::planned_launches(plan, true));
    add_launches(json, "launches_unaligned", cuda::planned_launches(plan, false));
  }
  add_steps(json, plan);
  const struct {
    const char* name;
    int64_t value;
  } counts[] = {
      {"batch", plan.batch},
      {"max_seqlen_q", plan.max_seqlen_q},
      {"max_seqlen_k", plan.max_seqlen_k},
      {"heads_q", plan.heads_q},
      {"heads_kv", plan.heads_kv},
      {"head_dim", plan.head_dim},
      {"head_dim_v", plan.head_dim_v},
      {"decode_queries", plan.decode_queries},
      {"scratch_bytes", plan.scratch_bytes},
      {"shared_bytes", plan.shared_bytes},
      {"workspace_bytes", plan.workspace_bytes},
      {"program_lists_bytes", on_cuda(plan) ? cuda::program_lists_bytes(plan) : 0},
  };
  for (const auto& [name, value] : counts) json.add(name, value);
  json.add("lengths_are_data", plan.lengths_are_data != 0);
  json.add("flops", plan.flops);
  json.add("bytes_moved", plan.bytes_moved);
  json.add("standard_bytes", plan.standard_bytes);
  json.add("standard_extra_bytes", plan.standard_extra_bytes);
  json.open("device", '{');
  json.add("backend", on_cuda(plan) ? "cuda" : "cpu");
  json.add("name", plan.device.name);
  json.add("isa", tessera_isa_name(plan.device.isa));
  json.add("isa_limit", tessera_isa_name(plan.device.isa_limit));
  if (plan.device.vector_isa != 0) json.add("vector_isa", tessera_isa_name(plan.device.vector_isa));
  json.add("cores", plan.device.cores);
  json.add("threads", plan.device.threads);
  json.add("l1_bytes", plan.device.l1_bytes);
  json.add("l2_bytes", plan.device.l2_bytes);
  json.add("ordinal", plan.device.ordinal);
  json.add("described", on_cuda(plan) && plan.device.ordinal < 0);
  json.add("arch", plan.device.arch);
  json.add("check_indices", plan.device.check_indices != 0);
  json.add("smem_bytes", plan.device.smem_bytes);
  json.close('}');
  add_problem(json, plan.problem);
  json.close('}');
  return json.take();
}

// Returns 0 if memory runs out: no exception may leave the C interface.
size_t write(const tessera_plan* plan, std::string (*make)(const tessera_plan&), char* text, size_t size) {
  if (text && size > 0) text[0] = '\0';
  if (check_plan(plan).code != TESSERA_OK) return 0;
  try {
    return copy_out(make(*plan), text, size);
  } catch (...) {
    return 0;
  }
}

}  // namespace
}  // namespace tessera::api

extern "C" {

size_t tessera_plan_describe(const tessera_plan* plan, char* text, size_t size) {
  return tessera::api::write(plan, tessera::api::describe, text, size);
}

size_t tessera_plan_json(const tessera_plan* plan, char* text, size_t size) {
  return tessera::api::write(plan, tessera::api::to_json, text, size);
}

}  // extern "C"
