#include "support.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/text.hpp"
#include "error.hpp"
#include "sized_problem.hpp"
#include "terminal.hpp"
#include "tessera/plan.hpp"

namespace tessera::cli {
namespace {

constexpr tessera_dtype kDtypes[] = {TESSERA_FLOAT32, TESSERA_FLOAT16,     TESSERA_BFLOAT16,
                                     TESSERA_FLOAT64, TESSERA_FLOAT8_E4M3, TESSERA_FLOAT8_E5M2};
constexpr tessera_direction kDirections[] = {TESSERA_FORWARD, TESSERA_BACKWARD};

const char* direction_name(tessera_direction direction) {
  return direction == TESSERA_FORWARD ? "forward" : "backward";
}

// ---- questions ------------------------------------------------------------------------------------------------------

struct BackEnd {
  const char* name;
  bool was_run;           // or only compiled, for lack of such a device
  const char* what_when;  // what was run on such devices, and when last
  tessera_device device{};
};

void check(const tessera_status& status) {
  if (status.code != TESSERA_OK) throw Failure(status.message);
}

// A GPU of each generation, and a CPU without optional features: support depends on neither.
std::vector<BackEnd> back_ends() {
  std::vector<BackEnd> all{
      {"CPU", true,
       "all tests on every change, on each instruction set (AMX emulated); AVX2 on Zen 3, AVX-512 BF16 on Zen 4, AMX "
       "on Intel's tiles: 2026-11-26"},
      {"Ampere", false,
       "every prebuilt kernel compiled for sm_80; its kernels run on Hopper and on the emulated GPU, never on an "
       "Ampere GPU"},
      {"Hopper", true, "case table, fuzzer, PyTorch's programs and compute-sanitizer on H100 and H200: 2026-11-26"},
      {"Blackwell", false,
       "every prebuilt kernel compiled for sm_100 and sm_120, never run there; on sm_100 expect a quarter to a third "
       "of what tcgen05 kernels reach (docs/reference/cuda.md)"}};
  constexpr std::int32_t kArchs[] = {0, 80, 90, 100};
  check(tessera_device_cpu(&all[0].device));
  all[0].device.isa = TESSERA_ISA_BASELINE;
  all[0].device.threads = 1;
  for (std::size_t i = 1; i < all.size(); ++i) check(tessera_device_cuda_arch(kArchs[i], &all[i].device));
  return all;
}

// A problem with one option added to the simplest one.
struct Case {
  std::string name, what;
  ProblemSizes sizes{};
  std::function<void(tessera_problem&)> set_options = [](tessera_problem&) {};
  bool only_backward = false;
  bool of_some_dtypes = false;  // others cannot have it
  bool of_wide_q = false;       // and in short it is asked of queries of 16 bits or more alone
};

void set_sample(const core::OptionField& field, tessera_problem& problem) {
  constexpr double kSampleNumber = 0.5;  // a scale, a probability
  constexpr double kSampleSoftcap = 30;  // a usual value: a kernel may refuse a small one
  constexpr std::int64_t kSampleLength = 64;
  for (const core::OptionMember& member : field.members) {
    if (member.flag != nullptr) problem.*member.flag = 1;
    if (member.integer != nullptr) problem.*member.integer = kSampleLength;
    if (member.number != nullptr) {
      problem.*member.number = member.number == &tessera_problem::softcap ? kSampleSoftcap : kSampleNumber;
    }
  }
  if (field.kind == core::OptionKind::kOptionalNumber) problem.has_scale = 1;
  if (field.kind == core::OptionKind::kAlignment) problem.causal = 1;
}

// Options without a meaning of their own: seeds, bounds of lengths, the block mask's blocks and places.
bool stands_alone(const core::OptionField& field) {
  for (const auto place : {&tessera_problem::first_q, &tessera_problem::first_k, &tessera_problem::first_head}) {
    if (field.members[0].integer == place) return false;
  }
  const bool of_block_mask = field.members[0].integer == &tessera_problem::mask_block_q;
  return field.kind != core::OptionKind::kUnsigned && field.kind != core::OptionKind::kInteger && !of_block_mask;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&all](const char* name, const char* what) -> Case& {
    Case& added = all.emplace_back();
    added.name = name;
    added.what = what;
    added.sizes.batch = 2;
    added.sizes.seqlen_q = 256;
    return added;
  };
  add("attention", "Dense q, k, v of head size 64");
  for (const std::int64_t head_dim : {128, 256, 512}) {
    Case& sized = add("", "Head size of queries, keys and values");
    sized.name = "head size " + std::to_string(head_dim);
    sized.sizes.head_dim = head_dim;
  }
  add("grouped heads", "Fewer heads of keys and values than of queries (GQA, MQA)").sizes.heads_kv = 2;
  add("values of another size", "Dv = 128 beside D = 64").sizes.head_dim_v = 128;
  Case& decoding = add("decoding", "One query against long keys");
  decoding.sizes.seqlen_q = 1;
  decoding.sizes.seqlen_k = 4096;
  add("packed", "Sequences of different lengths one after another: cu_seqlens_q, cu_seqlens_k").sizes.packed = true;
  add("paged", "Keys and values in pages: page_table, or page_indptr and page_indices; seqused_k").sizes.page_size = 16;
  constexpr std::pair<const char*, tessera_dtype> kCaches[] = {{"float8_e4m3 cache", TESSERA_FLOAT8_E4M3},
                                                               {"float8_e5m2 cache", TESSERA_FLOAT8_E5M2},
                                                               {"int8 cache", TESSERA_INT8}};
  for (const auto& [name, dtype] : kCaches) {
    Case& cache = add(name, "k and v of 8 bits under 16-bit q");
    cache.sizes.kv_dtype = dtype, cache.of_some_dtypes = cache.of_wide_q = true;
    Case& decoded = add("", "One query against long k and v of 8 bits");
    decoded.name = "decoding (" + std::string(name) + ")";
    decoded.sizes.kv_dtype = dtype, decoded.of_some_dtypes = decoded.of_wide_q = true;
    decoded.sizes.seqlen_q = 1, decoded.sizes.seqlen_k = 4096;
  }
  for (const core::TensorField& field : core::kTensorFields) {
    const bool of_packed_or_paged = field.dtypes == core::Dtypes::kInt32 && field.words == nullptr;
    if (!core::is_option(field) || of_packed_or_paged || core::of_several_calls(field)) continue;
    Case& with = add(field.name, field.what);
    with.sizes[field] = true;
    const bool of_cache = field.layout == &tessera_problem::k_descale || field.layout == &tessera_problem::v_descale;
    if (of_cache) with.sizes.kv_dtype = TESSERA_FLOAT8_E4M3;
    with.of_some_dtypes = field.form == core::Form::kScales;
    if (const core::TensorField* primal = core::primal_of(field)) with.sizes[*primal] = true;
    with.only_backward = !core::takes_part(field, false);
    // Blocks of 64 and 64, which only the block mask uses.
    with.set_options = [](tessera_problem& problem) { problem.mask_block_q = problem.mask_block_k = 64; };
  }
  for (const core::OptionField& field : core::kOptionFields) {
    if (!stands_alone(field)) continue;
    add(field.name, field.what).set_options = [&field](tessera_problem& problem) { set_sample(field, problem); };
  }
  add("global place", "A part of a longer sequence, with causal, windows and ALiBi of the whole").set_options =
      [](tessera_problem& problem) {
        problem.first_q = problem.first_k = 256, problem.total_q = problem.total_k = 1024;
        problem.causal = 1;
      };
  Case& accumulate = add("accumulate", "Partial results and gradients in float32 that the call adds to");
  accumulate.sizes[core::kTensorFields[core::TensorName("lse_low").index]] = true;
  accumulate.set_options = [](tessera_problem& problem) { problem.accumulate = 1; };
  return all;
}

// ---- answers --------------------------------------------------------------------------------------------------------

struct Answer {
  std::string kernel;               // "": none
  std::string reason;               // of the refusal
  std::vector<std::string> others;  // other kernels that support it
};

Answer answer_of(const Case& asked, const tessera_device& device, tessera_dtype dtype, tessera_direction direction) {
  ProblemSizes sizes = asked.sizes;
  sizes.dtype = dtype;
  sizes.direction = direction;
  const tessera_problem problem = problem_of(sizes, asked.set_options);
  tessera_plan plan{};
  const tessera_status status = tessera_make_plan(&problem, &device, &plan);
  if (status.code == TESSERA_OK) {
    Answer answer{plan.family, "", {}};
    for (const tessera_candidate& candidate : candidates(plan)) {
      if (candidate.accepted && candidate.kernel != answer.kernel) answer.others.emplace_back(candidate.kernel);
    }
    return answer;
  }
  std::string reason = status.message;
  constexpr std::string_view kOpening = "no kernel supports this problem: ";
  if (reason.starts_with(kOpening)) reason.erase(0, kOpening.size());
  return {"", reason, {}};
}

// The answers for a case on a back end in a direction, one for each dtype; empty if the case lacks that direction.
using Answers = std::vector<Answer>;
struct Matrix {
  std::vector<BackEnd> back_ends;
  std::vector<Case> cases;
  std::vector<Answers> answers;  // [case][back end][direction]

  const Answers& at(std::size_t asked, std::size_t back_end, tessera_direction direction) const {
    return answers[(asked * back_ends.size() + back_end) * std::size(kDirections) + (direction == TESSERA_BACKWARD)];
  }
};

Matrix make_matrix() {
  Matrix matrix{back_ends(), cases(), {}};
  for (const Case& asked : matrix.cases) {
    for (const BackEnd& back_end : matrix.back_ends) {
      for (const tessera_direction direction : kDirections) {
        Answers& answers = matrix.answers.emplace_back();
        if (asked.only_backward && direction == TESSERA_FORWARD) continue;
        for (const tessera_dtype dtype : kDtypes) {
          answers.push_back(answer_of(asked, back_end.device, dtype, direction));
        }
      }
    }
  }
  return matrix;
}

// "fwd_sm90 float16 bfloat16, fwd_sm80 float32": the kernels, each with its dtypes.
std::string cell_text(const Answers& answers) {
  if (answers.empty()) return "";
  std::vector<std::pair<std::string, std::string>> kernels;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    if (answers[i].kernel.empty()) continue;
    const auto same = [&](const auto& kernel) { return kernel.first == answers[i].kernel; };
    auto found = std::find_if(kernels.begin(), kernels.end(), same);
    if (found == kernels.end()) found = kernels.insert(kernels.end(), {answers[i].kernel, ""});
    found->second += std::string(" ") + tessera_dtype_name(kDtypes[i]);
  }
  if (kernels.empty()) return "no";
  std::string text;
  for (const auto& [kernel, dtypes] : kernels) text += (text.empty() ? "" : ", ") + kernel + dtypes;
  return text;
}

// True if every dtype of the simplest problem, of 16 bits or more, is supported; or any where only some can have the
// case.
bool whole(const Matrix& matrix, std::size_t asked, std::size_t back_end, tessera_direction direction) {
  const Answers &answers = matrix.at(asked, back_end, direction), &plainest = matrix.at(0, back_end, direction);
  const Case& of = matrix.cases[asked];
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const bool wide = tessera_dtype_bytes(kDtypes[i]) > 1, served = !answers[i].kernel.empty();
    if (of.of_some_dtypes) {
      if (served && (wide || !of.of_wide_q)) return true;
    } else if (wide && !served && !plainest[i].kernel.empty()) {
      return false;
    }
  }
  return !of.of_some_dtypes && !answers.empty();
}

std::string direction_text(bool forward, bool backward) {
  return forward && backward ? "yes" : forward ? "forward" : backward ? "backward" : "no";
}

std::string summary_of_dtype(const Matrix& matrix, std::size_t dtype, std::size_t back_end) {
  const auto taken = [&](tessera_direction direction) {
    return !matrix.at(0, back_end, direction)[dtype].kernel.empty();
  };
  return direction_text(taken(TESSERA_FORWARD), taken(TESSERA_BACKWARD));
}

std::string summary_of_case(const Matrix& matrix, std::size_t asked, std::size_t back_end) {
  const bool backward = whole(matrix, asked, back_end, TESSERA_BACKWARD);
  const bool forward = matrix.cases[asked].only_backward ? backward : whole(matrix, asked, back_end, TESSERA_FORWARD);
  return direction_text(forward, backward);
}

// ---- output ---------------------------------------------------------------------------------------------------------

using Rows = std::vector<std::vector<std::string>>;

std::vector<std::string> header_of(const Matrix& matrix) {
  std::vector<std::string> row{""};
  for (const BackEnd& back_end : matrix.back_ends) {
    const std::int32_t arch = back_end.device.arch;
    const char* const proof = back_end.was_run ? "" : ", compiled, not run here";
    row.push_back(arch == 0 ? back_end.name : core::print("%s (%d.%d)%s", back_end.name, arch / 10, arch % 10, proof));
  }
  return row;
}

Rows proof_rows(const Matrix& matrix) {
  Rows rows{{"", "what was run, and when"}};
  for (const BackEnd& back_end : matrix.back_ends) rows.push_back({back_end.name, back_end.what_when});
  return rows;
}

Rows summary_rows(const Matrix& matrix) {
  Rows rows{header_of(matrix)};
  const auto add = [&](const std::string& name, const auto& cell, std::size_t index) {
    std::vector<std::string>& row = rows.emplace_back(1, name);
    for (std::size_t i = 0; i < matrix.back_ends.size(); ++i) row.push_back(cell(matrix, index, i));
  };
  for (std::size_t d = 0; d < std::size(kDtypes); ++d) add(tessera_dtype_name(kDtypes[d]), summary_of_dtype, d);
  for (std::size_t asked = 1; asked < matrix.cases.size(); ++asked) {
    add(matrix.cases[asked].name, summary_of_case, asked);
  }
  return rows;
}

// Merges rows with equal cells, with both names.
Rows merged(const Rows& rows) {
  Rows result{rows[0]};
  for (std::size_t r = 1; r < rows.size(); ++r) {
    const std::vector<std::string>& row = rows[r];
    const auto alike = [&](const auto& other) { return std::equal(row.begin() + 1, row.end(), other.begin() + 1); };
    if (const auto found = std::find_if(result.begin() + 1, result.end(), alike); found != result.end()) {
      (*found)[0] += ", " + row[0];
    } else {
      result.push_back(row);
    }
  }
  return result;
}

Rows direction_rows(const Matrix& matrix, tessera_direction direction) {
  Rows rows{header_of(matrix)};
  for (std::size_t asked = 0; asked < matrix.cases.size(); ++asked) {
    if (matrix.at(asked, 0, direction).empty()) continue;
    std::vector<std::string> row{matrix.cases[asked].name};
    for (std::size_t i = 0; i < matrix.back_ends.size(); ++i) row.push_back(cell_text(matrix.at(asked, i, direction)));
    rows.push_back(std::move(row));
  }
  return merged(rows);
}

// Kernels that no plan chooses by itself, and what they support on request. Cases with the same dtypes are one row.
Rows request_rows(const Matrix& matrix) {
  std::set<std::string> chosen;
  for (const Answers& answers : matrix.answers) {
    for (const Answer& answer : answers) chosen.insert(answer.kernel);
  }
  std::map<std::pair<std::string, std::string>, std::string> supported;  // cases, by place and dtypes
  for (std::size_t asked = 0; asked < matrix.cases.size(); ++asked) {
    for (std::size_t i = 0; i < matrix.back_ends.size(); ++i) {
      for (const tessera_direction direction : kDirections) {
        const Answers& answers = matrix.at(asked, i, direction);
        std::map<std::string, std::string> dtypes;  // by kernel
        for (std::size_t d = 0; d < answers.size(); ++d) {
          for (const std::string& kernel : answers[d].others) {
            if (!chosen.contains(kernel)) dtypes[kernel] += std::string(" ") + tessera_dtype_name(kDtypes[d]);
          }
        }
        for (const auto& [kernel, taken] : dtypes) {
          std::string& names = supported[{kernel + ", " + matrix.back_ends[i].name, taken.substr(1)}];
          names += (names.empty() ? "" : ", ") + matrix.cases[asked].name;
        }
      }
    }
  }
  Rows rows{{"kernel", "dtypes", "supports"}};
  for (const auto& [where, names] : supported) rows.push_back({where.first, where.second, names});
  return rows;
}

std::string markdown_table(const Rows& rows) {
  std::string text;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (const std::string& cell : rows[i]) text += "| " + cell + " ";
    text += "|\n";
    if (i > 0) continue;
    for (std::size_t column = 0; column < rows[0].size(); ++column) text += column == 0 ? "| ---" : " | ---";
    text += " |\n";
  }
  return text;
}

std::string plain_table(const Rows& rows) {
  std::vector<int> widths(rows[0].size());
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], shown_width(row[i]));
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += row[i] + std::string(static_cast<std::size_t>(widths[i] - shown_width(row[i]) + 2), ' ');
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

// Each reason once, with its first case.
struct Refusal {
  std::string where, reason;
};
std::vector<Refusal> refusals(const Matrix& matrix) {
  std::vector<Refusal> all;
  for (std::size_t asked = 0; asked < matrix.cases.size(); ++asked) {
    for (std::size_t i = 0; i < matrix.back_ends.size(); ++i) {
      for (const tessera_direction direction : kDirections) {
        const Answers& answers = matrix.at(asked, i, direction);
        for (std::size_t d = 0; d < answers.size(); ++d) {
          const std::string& reason = answers[d].reason;
          const auto same = [&](const Refusal& refusal) { return refusal.reason == reason; };
          if (reason.empty() || std::any_of(all.begin(), all.end(), same)) continue;
          const std::string where = matrix.cases[asked].name + ", " + matrix.back_ends[i].name + ", " +
                                    direction_name(direction) + ", " + tessera_dtype_name(kDtypes[d]);
          all.push_back({where, reason});
        }
      }
    }
  }
  return all;
}

constexpr const char* kSummary =
    "yes: forward and backward, with every dtype of 16 bits or more that the back end has.";

std::string markdown(const Matrix& matrix) {
  std::string text =
      "# What is supported\n\n"
      "Made by `make docs`: `tessera support --markdown` plans a small problem with each option, for each back end, "
      "direction\n"
      "and dtype, and prints which kernel serves it. Options go together unless a refusal below says otherwise; "
      "`tessera plan`\n"
      "answers for any one problem, and for a GPU that is not there with `--arch`.\n\n";
  text += "## In short\n\n" + std::string(kSummary) + "\n\n" + markdown_table(merged(summary_rows(matrix))) + "\n" +
          markdown_table(proof_rows(matrix));
  for (const tessera_direction direction : kDirections) {
    text += std::string("\n## ") + (direction == TESSERA_FORWARD ? "Forward" : "Backward") + "\n\n" +
            markdown_table(direction_rows(matrix, direction));
  }
  if (const Rows rows = request_rows(matrix); rows.size() > 1) {
    text +=
        "\n## On request\n\nTaken by name alone (`--kernel`), until proved. (Those for comparison: "
        "docs/reference/kernels/comparison.md.)\n\n" +
        markdown_table(rows);
  }
  text += "\n## What is refused, and why\n\n| the first | reason |\n| --- | --- |\n";
  for (const Refusal& refusal : refusals(matrix)) text += "| " + refusal.where + " | " + refusal.reason + " |\n";
  text += "\n## What the options are\n\n| option | meaning |\n| --- | --- |\n";
  for (const Case& asked : matrix.cases) text += "| " + asked.name + " | " + asked.what + " |\n";
  return text;
}

std::string json(const Matrix& matrix) {
  core::JsonWriter json;
  const auto text_or_null = [&json](const char* key, const std::string& text) {
    constexpr double kNull = std::numeric_limits<double>::quiet_NaN();  // becomes null
    text.empty() ? json.add(key, kNull) : json.add(key, text.c_str());
  };
  json.open(nullptr, '{');
  json.add("version", tessera_version());
  json.open("options", '[');
  for (std::size_t asked = 0; asked < matrix.cases.size(); ++asked) {
    json.open(nullptr, '{');
    json.add("name", matrix.cases[asked].name.c_str());
    json.add("what", matrix.cases[asked].what.c_str());
    json.open("cells", '[');
    for (std::size_t i = 0; i < matrix.back_ends.size(); ++i) {
      for (const tessera_direction direction : kDirections) {
        const Answers& answers = matrix.at(asked, i, direction);
        for (std::size_t d = 0; d < answers.size(); ++d) {
          json.open(nullptr, '{');
          json.add("back_end", matrix.back_ends[i].name);
          json.add("arch", matrix.back_ends[i].device.arch);
          json.add("was_run", matrix.back_ends[i].was_run);
          json.add("direction", direction_name(direction));
          json.add("dtype", tessera_dtype_name(kDtypes[d]));
          text_or_null("kernel", answers[d].kernel);
          text_or_null("reason", answers[d].reason);
          json.close('}');
        }
      }
    }
    json.close(']');
    json.close('}');
  }
  json.close(']');
  json.close('}');
  return json.take();
}

std::string plain(const Matrix& matrix) {
  return plain_table(summary_rows(matrix)) + "\n" + kSummary + "\n\n" + plain_table(proof_rows(matrix)) +
         "\nWith --markdown and --json: which kernel, which dtypes, and why not.\n";
}

}  // namespace

std::string support_text() { return plain(make_matrix()); }
std::string support_markdown() { return markdown(make_matrix()); }
std::string support_json() { return json(make_matrix()); }

}  // namespace tessera::cli
