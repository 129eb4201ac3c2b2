// tessera compare: Tessera beside standard attention, on a GPU also beside its first algorithm, over a range of
// lengths.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "commands.hpp"
#include "compare_cell.hpp"
#include "comparison_table.hpp"
#include "error.hpp"
#include "gpu.hpp"
#include "machine.hpp"
#include "options.hpp"
#include "output_file.hpp"
#include "peers/ceilings.hpp"
#include "progress.hpp"
#include "score_options.hpp"
#include "terminal.hpp"
#include "units.hpp"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

struct CompareOptions {
  std::int64_t batch = 1, heads = 8, head_dim = 64;
  std::optional<std::int64_t> heads_kv;
  std::string dtype, direction = "both", report;
  std::vector<std::string> against = {"standard"};
  bool causal = false, json = false;
  std::vector<std::int64_t> lengths = {512, 1024, 2048, 4096, 8192, 16384};
  std::int64_t repeat = 5;
  std::optional<double> memory_limit_gib;
  ScoreOptions score;
  DeviceOptions device;
};

const char* direction_name(tessera_direction direction) {
  return direction == TESSERA_BACKWARD ? "backward" : "forward";
}

void require(bool holds, const char* flag, const std::string& given, const char* accepted) {
  if (!holds) throw WrongUse(fmt::format("{}: {}, accepted {}", flag, given, accepted));
}

class Compare {
 public:
  explicit Compare(const CompareOptions& options) : options_(options) {
    if (!options.report.empty()) report_.emplace(options.report, "--report " + options.report);
    device_ = options.device.device();
    on_gpu_ = device_.backend == TESSERA_BACKEND_CUDA;
    dtype_ = parse_dtype(!options.dtype.empty() ? options.dtype : on_gpu_ ? "bfloat16" : "float32");
    check_options();
    program_ = options.score.program(false);
    set_contestants();
    host_threads_ = device_.threads;
    if (!on_gpu_) return;
    tessera_device cpu{};
    check_status(tessera_device_cpu(&cpu));
    host_threads_ = static_cast<std::int32_t>(options.device.threads.value_or(cpu.threads));
  }

  void execute() {
    const std::vector<CellSettings> plan = settings();
    double total_flops = 0;
    for (const CellSettings& cell : plan) total_flops += cell.shape.flops(cell.direction);
    Progress progress(total_flops);
    if (!on_gpu_) {
      progress.show("measuring this machine's peak");
      busy_ = busy_text(device_.threads);
    }
    measure_peak();
    ComparisonTable table = make_table();
    if (!options_.json) {
      progress.clear();
      fmt::print("{}\n\n{}", lines(title()), table.header());
      std::fflush(stdout);
    }
    for (const CellSettings& cell : plan) {
      const std::string where = fmt::format("{}, length {}: ", direction_name(cell.direction), cell.shape.seqlen_q);
      cells_.push_back(measure_cell(cell, [&](const std::string& what) { progress.show(where + what); }));
      progress.advance(cell.shape.flops(cell.direction));
      if (!options_.json) {
        progress.clear();
        fmt::print("{}", table.row(direction_name(cell.direction), cell.shape.seqlen_q, row(cells_.back())));
        std::fflush(stdout);
      }
    }
    progress.clear();
    if (options_.json) {
      fmt::print("{}", json_text());
    } else {
      fmt::print("\n{}\n", table.legend(queries_alone(), notes()));
    }
    if (report_) {
      const std::string text = json_text();
      report_->open();
      report_->write(text.data(), static_cast<std::int64_t>(text.size()));
      report_->commit();
    }
  }

 private:
  // The best of enough rounds that more would not change it. The table, the JSON and the picture use this one number.
  void measure_peak() {
    if (on_gpu_) return;
    constexpr int kRoundsWithoutMore = 3;
    constexpr double kMore = 1.005, kMostSeconds = 1.5;
    const auto start = std::chrono::steady_clock::now();
    for (int without = 0; without < kRoundsWithoutMore; ++without) {
      const double peak = peers::peak_gflops(dtype_, static_cast<tessera_isa>(device_.isa), device_.threads);
      if (peak > peak_gflops_ * kMore) without = 0;
      peak_gflops_ = std::max(peak_gflops_, peak);
      if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > kMostSeconds) return;
    }
  }

  void set_contestants() {
    for (const std::string& name : options_.against) {
      const Contestant* const contestant = find_contestant(name);
      const bool here = contestant != nullptr && (on_gpu_ || contestant->on_cpu);
      require(here, "--against", "'" + name + "'", on_gpu_ ? "standard and fa1" : "standard, on a GPU also fa1");
      require(std::find(against_.begin(), against_.end(), contestant) == against_.end(), "--against",
              "'" + name + "' twice", "each once");
      against_.push_back(contestant);
    }
  }

  void check_options() const {
    const CompareOptions& o = options_;
    constexpr std::int64_t kMost = 1 << 24;
    const auto size = [&](const char* flag, std::int64_t value) {
      require(value >= 1 && value <= kMost, flag, fmt::format("{}", value), "1 .. 2^24");
    };
    size("-B", o.batch);
    size("-H", o.heads);
    size("--kv-heads", o.heads_kv.value_or(o.heads));
    for (const std::int64_t length : o.lengths) size("--lengths", length);
    require(o.head_dim >= 1 && o.head_dim <= 512, "-D", fmt::format("{}", o.head_dim), "1 .. 512");
    require(o.heads % o.heads_kv.value_or(o.heads) == 0, "--kv-heads", fmt::format("{}", o.heads_kv.value_or(o.heads)),
            fmt::format("a divisor of -H, {}", o.heads).c_str());
    require(o.repeat >= 1 && o.repeat <= 1000, "--repeat", fmt::format("{}", o.repeat), "1 .. 1000");
    require(dtype_ != TESSERA_FLOAT64, "--dtype", o.dtype, "float32, float16 and bfloat16");
    require(o.direction == "forward" || o.direction == "backward" || o.direction == "both", "--direction",
            "'" + o.direction + "'", "forward, backward and both");
    require(!o.memory_limit_gib || (*o.memory_limit_gib >= 0 && *o.memory_limit_gib < 1e6), "--memory-limit",
            fmt::format("{}", o.memory_limit_gib.value_or(0)), "0 GiB and more");
  }

  std::vector<CellSettings> settings() const {
    std::vector<tessera_direction> directions;
    if (options_.direction != "backward") directions.push_back(TESSERA_FORWARD);
    if (options_.direction != "forward") directions.push_back(TESSERA_BACKWARD);
    constexpr double kBytesPerGib = 1024.0 * 1024.0 * 1024.0;
    std::vector<CellSettings> plan;
    for (const tessera_direction direction : directions) {
      for (const std::int64_t length : options_.lengths) {
        CellSettings cell;
        cell.shape = {.batch = options_.batch,
                      .seqlen_q = length,
                      .seqlen_k = length,
                      .heads_q = options_.heads,
                      .heads_kv = options_.heads_kv.value_or(options_.heads),
                      .head_dim = options_.head_dim,
                      .head_dim_v = options_.head_dim,
                      .causal = options_.causal,
                      .scale = 0};
        cell.dtype = dtype_;
        cell.direction = direction;
        cell.device = device_;
        cell.host_threads = host_threads_;
        cell.repeat = static_cast<int>(options_.repeat);
        cell.against = against_;
        cell.program = program_;
        cell.standard_limit_bytes = options_.memory_limit_gib
                                        ? static_cast<std::int64_t>(*options_.memory_limit_gib * kBytesPerGib)
                                        : std::numeric_limits<std::int64_t>::max();
        plan.push_back(cell);
      }
    }
    return plan;
  }

  std::string heads_text() const {
    const std::int64_t kv = options_.heads_kv.value_or(options_.heads);
    return kv == options_.heads ? fmt::format("H {}", kv) : fmt::format("H {}/{}", options_.heads, kv);
  }

  std::string title() const {
    const std::string directions = options_.direction == "both" ? "forward and backward" : options_.direction;
    const std::string where = on_gpu_ ? fmt::format("{}, {} multiprocessors", device_.name, device_.cores)
                                      : fmt::format("{}, {} thread{}, {} · measured peak {} GFLOP/s", device_.name,
                                                    device_.threads, device_.threads == 1 ? "" : "s",
                                                    tessera_isa_name(device_.isa), number_text(peak_gflops_));
    return fmt::format("Exact attention, {} · {} · B {}, {}, D {}, {} · {}", directions, tessera_dtype_name(dtype_),
                       options_.batch, heads_text(), options_.head_dim, options_.causal ? "causal" : "full", where) +
           program_text();
  }

  // " · score ... · mask ..."
  std::string program_text() const {
    if (!program_) return "";
    const std::string score = program_->text(TESSERA_PROGRAM_SCORE), mask = program_->text(TESSERA_PROGRAM_MASK);
    return (score.empty() ? "" : " · score " + score) + (mask.empty() ? "" : " · mask " + mask);
  }

  ComparisonTable make_table() const {
    ComparisonTable::Settings settings{
        .sides = {{"Tessera", "Tessera"}}, .peak_gflops = peak_gflops_, .teraflops = on_gpu_, .width = width()};
    for (const Contestant* const contestant : against_) settings.sides.push_back({contestant->words, contestant->name});
    return ComparisonTable(settings);
  }

  static std::optional<int> width() { return terminal_width(STDOUT_FILENO); }

  // Text, shortened to the terminal's width.
  static std::string lines(const std::string& text) { return width() ? wrapped(text, *width()) : text; }

  static ComparedNumbers numbers(const Side& side) {
    ComparedNumbers numbers;
    numbers.seconds = side.seconds;
    numbers.gflops = side.gflops;
    numbers.extra_bytes = static_cast<double>(side.extra_bytes);
    numbers.max_error = side.error.max_abs;
    numbers.rms_error = side.error.rms;
    return numbers;
  }

  static std::vector<ComparedNumbers> row(const Cell& cell) {
    std::vector<ComparedNumbers> sides = {numbers(cell.tessera)};
    for (const Other& other : cell.others) {
      sides.push_back(other.side ? numbers(*other.side) : ComparedNumbers{});
      sides.back().needs_bytes = static_cast<double>(other.needs_bytes);
    }
    return sides;
  }

  // A backward pass reports the errors of the queries' gradient alone if the sample has no other.
  bool queries_alone() const {
    return std::any_of(cells_.begin(), cells_.end(), [](const Cell& cell) {
      return cell.settings.direction == TESSERA_BACKWARD && cell.tessera.errors.size() == 1;
    });
  }

  std::string notes() const {
    std::string text;
    if (on_gpu_) {
      text =
          "Standard attention, whose backward pass makes P again, and the first algorithm are Tessera's own kernels, "
          "for "
          "comparison alone; python -m tessera compare measures PyTorch's.";
    } else {
      text = busy_;
    }
    for (const Contestant* const contestant : against_) {
      const auto refused = std::find_if(cells_.begin(), cells_.end(),
                                        [&](const Cell& cell) { return !other_of(cell, contestant).refusal.empty(); });
      if (refused != cells_.end()) {
        text += fmt::format("{}Refused by {}: {}.", text.empty() ? "" : " ", contestant->words,
                            other_of(*refused, contestant).refusal);
      }
    }
    return text;
  }

  static const Other& other_of(const Cell& cell, const Contestant* contestant) {
    return *std::find_if(cell.others.begin(), cell.others.end(),
                         [&](const Other& other) { return other.contestant == contestant; });
  }

  static Json side_json(const Side& side, double peak) {
    Json json = {{"ms", side.seconds * 1e3},
                 {"gflops", side.gflops},
                 {"share_of_peak", peak > 0 ? Json(side.gflops / peak) : Json(nullptr)},
                 {"extra_bytes", side.extra_bytes},
                 {"resident_growth_bytes", side.resident_bytes},
                 {"max_error", side.error.max_abs},
                 {"rms_error", side.error.rms}};
    for (const auto& [name, error] : side.errors) {
      json["errors"][name] = {{"max", error.max_abs}, {"rms", error.rms}, {"elements", error.elems}};
    }
    return json;
  }

  Json json() const {
    Json json = {{"version", tessera_version()},
                 {"title", title()},
                 {"memory_bytes", on_gpu_ ? Gpu(device_.ordinal).memory_bytes() : memory_bytes()},
                 {"memory_of", on_gpu_ ? "this GPU" : "this machine"},
                 {"device", on_gpu_ ? "cuda" : "cpu"},
                 {"busy", busy_}};
    if (on_gpu_) {
      json.update(Json{{"gpu", device_.name}, {"arch", device_.arch}, {"multiprocessors", device_.cores}});
    } else {
      json.update(Json{{"cpu", device_.name},
                       {"isa", tessera_isa_name(device_.isa)},
                       {"threads", device_.threads},
                       {"peak_gflops", peak_gflops_},
                       {"blas", peers::blas_description()}});
    }
    json.update(Json{{"dtype", tessera_dtype_name(dtype_)},
                     {"batch", options_.batch},
                     {"heads", options_.heads},
                     {"heads_kv", options_.heads_kv.value_or(options_.heads)},
                     {"head_dim", options_.head_dim},
                     {"causal", options_.causal},
                     {"score_mod", program_ ? program_->text(TESSERA_PROGRAM_SCORE) : ""},
                     {"mask_mod", program_ ? program_->text(TESSERA_PROGRAM_MASK) : ""},
                     {"cells", Json::array()}});
    for (const Cell& cell : cells_) {
      Json entry = {{"direction", direction_name(cell.settings.direction)},
                    {"length", cell.settings.shape.seqlen_q},
                    {"flops", cell.settings.shape.flops(cell.settings.direction)},
                    {"kernel", cell.kernel},
                    {"tessera", side_json(cell.tessera, peak_gflops_)}};
      for (const Other& other : cell.others) {
        const std::string name = other.contestant->name;
        entry[name] = other.side ? side_json(*other.side, peak_gflops_) : Json(nullptr);
        entry[name + "_needs_bytes"] = other.needs_bytes;
        if (!other.refusal.empty()) entry[name + "_refusal"] = other.refusal;
        entry[name == "standard" ? "speed_up" : "speed_up_over_" + name] =
            other.side ? Json(cell.speed_up(other)) : Json(nullptr);
      }
      json["cells"].push_back(entry);
    }
    return json;
  }

  std::string json_text() const { return json().dump(2, ' ', false, Json::error_handler_t::replace) + "\n"; }

  const CompareOptions& options_;
  std::optional<OutputFile> report_;
  tessera_dtype dtype_ = TESSERA_FLOAT32;
  std::vector<const Contestant*> against_;
  tessera_device device_{};
  bool on_gpu_ = false;
  std::shared_ptr<ScoreProgram> program_;  // nullptr: none
  std::int32_t host_threads_ = 1;
  double peak_gflops_ = 0;
  std::string busy_;  // a sentence, where other work takes processors
  std::vector<Cell> cells_;
};

constexpr const char* kFooter =
    R"(Standard attention is the textbook's: it stores the score matrix, with OpenBLAS for the products; on a GPU it
and the first FlashAttention's schedule, fa1, are Tessera's own kernels for comparison, on tensor cores. Errors are
those against float64, on sampled rows. A score program is evaluated there by rows, one operation after another;
gradients of what it reads are not computed. FLOPs: 4 B H N^2 D forward, halved when causal, times 2.5 backward.

Examples:
  tessera compare
  tessera compare --causal --lengths 1024,4096,16384 --report compare.json
  tessera compare --dtype bfloat16 -H 32 --kv-heads 8 -D 128 --direction forward
  tessera compare --device cuda --against standard,fa1 -B 4 -H 16 --lengths 1024,4096,16384,65536
  tessera compare --lengths 2048 --json
  tessera compare --score-mod "s * temperature" --mask-mod "j <= q_pos && j % 3 != 1" --bind temperature=0.8)";

}  // namespace

void add_compare(CLI::App& program, Outcome& outcome) {
  CLI::App* command = program.add_subcommand("compare", "Tessera beside standard attention: time, memory, error");
  auto options = std::make_shared<CompareOptions>();
  CompareOptions& o = *options;
  command->add_option("--lengths", o.lengths, "Sequence lengths")
      ->check(kInteger)
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--direction", o.direction, "forward, backward or both")->capture_default_str();
  command->add_option("-B,--batch", o.batch, "Sequences")->check(kInteger)->capture_default_str();
  command->add_option("-H,--heads", o.heads, "Query heads")->check(kInteger)->capture_default_str();
  command->add_option("--kv-heads", o.heads_kv, "Key and value heads (default: -H)")->check(kInteger);
  command->add_option("-D,--head-dim", o.head_dim, "Head size")->check(kInteger)->capture_default_str();
  command->add_option("--dtype", o.dtype, "float32, float16 or bfloat16 (default: float32, on a GPU bfloat16)");
  command
      ->add_option("--against", o.against,
                   "What to hold Tessera against: standard, on a GPU also fa1, the first FlashAttention's schedule")
      ->delimiter(',')
      ->capture_default_str();
  command->add_flag("--causal", o.causal, "A query sees no key right of the diagonal");
  command->add_option("--repeat", o.repeat, "Timed calls of each, fewer when they are long; the median counts")
      ->capture_default_str();
  command->add_option("--memory-limit", o.memory_limit_gib,
                      "GiB that what is compared may take (default: what is available)");
  command->add_flag("--json", o.json, "The numbers as JSON, and nothing else");
  command
      ->add_option("--report", o.report,
                   "Write the numbers as JSON into this file, too: python -m tessera plot draws it")
      ->check(kFileName)
      ->type_name("FILE");
  o.score.add_to(*command);
  o.device.add_place_to(*command);
  o.device.add_to(*command);
  command->footer(kFooter);
  command->callback([options, &outcome] {
    Compare(*options).execute();
    outcome.exit_code = 0;
  });
}

}  // namespace tessera::cli
