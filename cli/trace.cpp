// tessera trace: a tiled attention, step by step: a row's state, and the bytes that each step moves.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "attention_call.hpp"
#include "commands.hpp"
#include "error.hpp"
#include "files.hpp"
#include "interrupts.hpp"
#include "options.hpp"
#include "program_scores.hpp"
#include "score_options.hpp"
#include "sized_problem.hpp"
#include "tiled_attention.hpp"
#include "traffic.hpp"
#include "units.hpp"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

struct TraceOptions {
  std::int64_t length = 512, head_dim = 64, block_m = 128, block_n = 64, entries = 4;
  std::optional<std::int64_t> row;
  std::uint64_t seed = 0;
  std::string dtype = "bfloat16", save;
  bool json = false;
  AttentionOptions attention;
  ScoreOptions score;
};

// A visited tile's effect on the watched row.
struct RowStep {
  double m, l, lse, norm, distance;  // |o / l|, and its distance from the oracle's row
  std::vector<double> o;             // the first entries of o / l
};

double norm_of(const std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return std::sqrt(sum);
}

void require(bool holds, const char* flag, std::int64_t given, const std::string& accepted) {
  if (!holds) throw WrongUse(fmt::format("{}: {}, accepted {}", flag, given, accepted));
}

class Trace {
 public:
  explicit Trace(const TraceOptions& options) : options_(options), dtype_(parse_dtype(options.dtype)) {
    check_sizes();
    if (!options.save.empty()) {
      for (const char* name : kSaved) files_.add(options.save + ":" + name, fmt::format("--save {}", name), name);
    }
    program_ = options.score.program(false);
    if (program_) in_float64_.program = program_;
    plan_ = make_plan();
    problem_ = tiled_problem(plan_, options.block_m, options.block_n);
    if (program_) {
      const ProgramScores scores(program_, options.length);
      problem_.visible = [scores](std::int64_t i, std::int64_t j) { return scores.visible(i, j); };
      problem_.score = [scores](std::int64_t i, std::int64_t j, double s) { return scores.score(i, j, s); };
    }
    tiles_ = tiles_of(problem_);
    row_ = options.row.value_or(options.length - 1);
  }

  void execute() {
    const Interrupts interrupts;
    draw_inputs();
    compute_exact();
    Tensor o = tensor("o", TESSERA_FLOAT64, {1, options_.length, 1, options_.head_dim});
    std::vector<double> lse(static_cast<std::size_t>(options_.length));
    tiled_attention(problem_, tiles_, in_float64_["q"].as<double>(), in_float64_["k"].as<double>(),
                    in_float64_["v"].as<double>(), o.as<double>(), lse.data(),
                    [this](const Tile& tile, const std::vector<RowState>& rows) { record(tile, rows); });
    const double* exact_o = in_float64_["o"].as<double>();
    const float* exact_lse = in_float64_["lse"].as<float>();
    for (std::int64_t x = 0; x < o.elems(); ++x) {
      error_o_ = std::max(error_o_, std::abs(o.as<double>()[x] - exact_o[x]));
    }
    for (std::int64_t i = 0; i < options_.length; ++i) {
      error_lse_ = std::max(error_lse_, std::abs(static_cast<double>(static_cast<float>(lse[i])) - exact_lse[i]));
    }
    if (!options_.save.empty()) save(o);
    fmt::print("{}", options_.json ? json().dump(2) + "\n" : text());
  }

 private:
  static constexpr std::int64_t kMostLength = 8192, kMostTiles = 1 << 16;
  static constexpr const char* kSaved[] = {"q", "k", "v", "o", "lse"};

  void check_sizes() const {
    const TraceOptions& o = options_;
    require(o.length >= 1 && o.length <= kMostLength, "--length", o.length, fmt::format("1 .. {}", kMostLength));
    require(o.head_dim >= 1 && o.head_dim <= core::kMaxHeadDim, "--head-dim", o.head_dim,
            fmt::format("1 .. {}", core::kMaxHeadDim));
    require(o.block_m >= 1 && o.block_m <= kMostLength, "--block-m", o.block_m, fmt::format("1 .. {}", kMostLength));
    require(o.block_n >= 1 && o.block_n <= kMostLength, "--block-n", o.block_n, fmt::format("1 .. {}", kMostLength));
    const std::int64_t tiles = ((o.length + o.block_m - 1) / o.block_m) * ((o.length + o.block_n - 1) / o.block_n);
    if (tiles > kMostTiles) {
      throw WrongUse(fmt::format("--block-m, --block-n: {} x {}, {} tiles of --length {}, accepted at most {} tiles",
                                 o.block_m, o.block_n, tiles, o.length, kMostTiles));
    }
    require(!o.row || (*o.row >= 0 && *o.row < o.length), "--row", o.row.value_or(0),
            fmt::format("0 .. {}, the rows of --length", o.length - 1));
    if (!o.save.empty() && !o.save.ends_with(".safetensors")) {
      throw WrongUse(fmt::format("--save: '{}', accepted is a name that ends in .safetensors", o.save));
    }
    require(o.entries >= 0 && o.entries <= o.head_dim, "--entries", o.entries,
            fmt::format("0 .. {}, the entries of a row", o.head_dim));
  }

  // The library's own plan for this problem: its counts are compared with the trace's totals.
  tessera_plan make_plan() const {
    ProblemSizes sizes;
    sizes.seqlen_q = options_.length;
    sizes.heads_q = 1;
    sizes.head_dim = options_.head_dim;
    sizes.dtype = dtype_;
    sizes[core::kTensorFields[core::TensorName("lse").index]] = true;
    const tessera_problem problem = problem_of(sizes, [this](tessera_problem& p) {
      options_.attention.apply(p);
      if (program_) program_->describe(p);
    });
    const tessera_device device = cpu();
    tessera_plan plan{};
    check_status(tessera_make_plan(&problem, &device, &plan));
    return plan;
  }

  static tessera_device cpu() {
    tessera_device device{};
    check_status(tessera_device_cpu(&device));
    device.kernel = TESSERA_KERNEL_REFERENCE;
    return device;
  }

  static Tensor tensor(const std::string& name, tessera_dtype dtype, Shape shape) {
    return make_tensor(name, dtype, std::move(shape));
  }

  // Standard normal numbers, rounded to the dtype; float64 values of the rounded numbers.
  void draw_inputs() {
    std::mt19937_64 random(options_.seed);
    std::normal_distribution<double> normal;
    for (const core::TensorName name : {core::TensorName("q"), core::TensorName("k"), core::TensorName("v")}) {
      const char* text = core::kTensorFields[name.index].name;
      Tensor drawn = tensor(text, dtype_, {1, options_.length, 1, options_.head_dim});
      for (std::int64_t x = 0; x < drawn.elems(); ++x) set_element(drawn, x, normal(random));
      inputs_[name] = drawn;
      in_float64_[name] = converted(drawn, TESSERA_FLOAT64);
    }
  }

  // By the library's oracle, in float64.
  void compute_exact() {
    in_float64_["o"] = tensor("o", TESSERA_FLOAT64, {1, options_.length, 1, options_.head_dim});
    in_float64_["lse"] = tensor("lse", TESSERA_FLOAT32, {1, 1, options_.length});
    run_attention(in_float64_, options_.attention, cpu(), TESSERA_FORWARD);
    const double* o = in_float64_["o"].as<double>() + row_ * options_.head_dim;
    exact_row_.assign(o, o + options_.head_dim);
  }

  void record(const Tile& tile, const std::vector<RowState>& rows) {
    throw_if_interrupted();
    if (row_ < tile.row_begin || row_ >= tile.row_end) return;
    const RowState& row = rows[static_cast<std::size_t>(row_ - tile.row_begin)];
    result_ = row.output();
    std::vector<double> difference(result_.size());
    std::ranges::transform(result_, exact_row_, difference.begin(), std::minus<>());
    row_steps_.push_back({row.m, row.l, row.lse(), norm_of(result_), norm_of(difference),
                          std::vector<double>(result_.begin(), result_.begin() + options_.entries)});
  }

  void save(const Tensor& o) {
    Tensor lse = in_float64_["lse"];
    for (const char* name : {"q", "k", "v"}) {
      const core::TensorField& field = core::kTensorFields[core::tensor_index(name)];
      files_.set(fmt::format("--save {}", name), inputs_[field], inputs_[field].shape);
    }
    files_.set("--save o", o, o.shape);
    files_.set("--save lse", lse, lse.shape);
    files_.commit();
  }

  std::int64_t element_bytes() const { return static_cast<std::int64_t>(tessera_dtype_bytes(dtype_)); }

  std::int64_t count(TileKind kind) const {
    return std::ranges::count_if(tiles_, [kind](const Tile& tile) { return tile.kind == kind; });
  }

  Traffic total() const {
    Traffic sum;
    for (const Tile& tile : tiles_) {
      if (tile.kind != TileKind::kSkipped) sum += traffic_of_tile(problem_, tile, element_bytes());
    }
    return sum;
  }

  // ---- JSON: -inf, of a row that has seen nothing yet, is null ------------------------------------------------------

  static Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

  static Json traffic_json(const Traffic& traffic) {
    Json json;
    for (int level = 0; level < kLevels; ++level) {
      json[kLevelNames[level]] = {{"read", traffic.levels[level].read}, {"written", traffic.levels[level].written}};
    }
    return json;
  }

  Json steps_json() const {
    Json steps = Json::array();
    auto row = row_steps_.begin();
    for (const Tile& tile : tiles_) {
      Json step = {{"tile", {tile.i, tile.j}},
                   {"queries", {tile.row_begin, tile.row_end}},
                   {"keys", {tile.key_begin, tile.key_end}},
                   {"kind", tile_kind_name(tile.kind)}};
      if (tile.kind != TileKind::kSkipped) {
        step["bytes"] = traffic_json(traffic_of_tile(problem_, tile, element_bytes()));
        if (row_ >= tile.row_begin && row_ < tile.row_end) {
          step["row"] = {{"m", number(row->m)},       {"l", row->l}, {"lse", number(row->lse)}, {"o_norm", row->norm},
                         {"distance", row->distance}, {"o", row->o}};
          ++row;
        }
      }
      steps.push_back(step);
    }
    return steps;
  }

  Json json() const {
    const tessera_problem& p = plan_.problem;
    const TileMemory memory = memory_of_tile(problem_, element_bytes());
    const StandardTraffic standard = traffic_of_standard(problem_, tiles_, element_bytes());
    return {{"version", tessera_version()},
            {"length", options_.length},
            {"head_dim", options_.head_dim},
            {"dtype", tessera_dtype_name(dtype_)},
            {"block_m", options_.block_m},
            {"block_n", options_.block_n},
            {"causal", p.causal != 0},
            {"window_left", p.window_left},
            {"window_right", p.window_right},
            {"scale", p.scale},
            {"score_mod", program_ ? program_->text(TESSERA_PROGRAM_SCORE) : ""},
            {"mask_mod", program_ ? program_->text(TESSERA_PROGRAM_MASK) : ""},
            {"seed", options_.seed},
            {"tiles",
             {{"full", count(TileKind::kFull)},
              {"partial", count(TileKind::kPartial)},
              {"skipped", count(TileKind::kSkipped)}}},
            {"tile_memory", {{"shared_bytes", memory.shared_bytes}, {"register_bytes", memory.register_bytes}}},
            {"steps", steps_json()},
            {"row",
             {{"index", row_},
              {"o", result_},
              {"lse", number(row_steps_.back().lse)},
              {"exact_o", exact_row_},
              {"exact_lse", number(in_float64_["lse"].as<float>()[row_])}}},
            {"max_error", {{"o", error_o_}, {"lse", error_lse_}}},
            {"bytes",
             {{"tiled", traffic_json(total())},
              {"standard", traffic_json(standard.total())},
              {"standard_scores", traffic_json(standard.scores)},
              {"standard_softmax", traffic_json(standard.softmax)},
              {"standard_product", traffic_json(standard.product)}}},
            {"plan",
             {{"flops", plan_.flops}, {"bytes_moved", plan_.bytes_moved}, {"standard_bytes", plan_.standard_bytes}}}};
  }

  // ---- words --------------------------------------------------------------------------------------------------------

  // One character for each tile, or none if the terminal is too narrow.
  std::string map_text() const {
    constexpr std::int64_t kMostColumns = 64, kMostRows = 32;
    const Tile& last = tiles_.back();
    if (last.j >= kMostColumns || last.i >= kMostRows) return "";
    std::string text = "\n";
    for (const Tile& tile : tiles_) {
      text += tile.kind == TileKind::kFull ? "█" : tile.kind == TileKind::kPartial ? "▒" : "·";
      const bool watched = row_ >= tile.row_begin && row_ < tile.row_end;
      if (tile.j == last.j) text += watched ? fmt::format("  row {}\n", row_) : "\n";
    }
    return text + "█ all visible   ▒ some of it   · nothing: skipped\n";
  }

  std::string row_text() const {
    std::string text = fmt::format(
        "\nRow {}, after each block of keys that its tile visits\n{:>12} {:>10} {:>12} {:>10} {:>10} {:>16}\n", row_,
        "keys", "m", "l", "LSE", "|O|", "|O - exact|");
    auto step = row_steps_.begin();
    for (const Tile& tile : tiles_) {
      if (tile.kind == TileKind::kSkipped || row_ < tile.row_begin || row_ >= tile.row_end) continue;
      text += fmt::format("{:>12} {:>10.5f} {:>12.5f} {:>10.5f} {:>10.6f} {:>16.3g}\n",
                          fmt::format("{} .. {}", tile.key_begin, tile.key_end - 1), step->m, step->l, step->lse,
                          step->norm, step->distance);
      ++step;
    }
    return text +
           fmt::format("largest difference from the oracle, of all rows: O {:.1e}, LSE {:.1e}\n", error_o_, error_lse_);
  }

  std::string bytes_text_of() const {
    const Traffic tiled = total(), standard = traffic_of_standard(problem_, tiles_, element_bytes()).total();
    constexpr const char* kWords[] = {"registers", "shared memory", "L2", "HBM"};
    std::string text = fmt::format("\n{:<14} {:>12} {:>12} {:>14} {:>14} {:>9}\n", "Bytes", "read", "written",
                                   "standard read", "written", "ratio");
    const auto bytes = [](std::int64_t value) { return bytes_text(static_cast<double>(value)); };
    for (int level = 0; level < kLevels; ++level) {
      const LevelBytes &ours = tiled.levels[level], &theirs = standard.levels[level];
      text += fmt::format("{:<14} {:>12} {:>12} {:>14} {:>14} {:>7.1f} x\n", kWords[level], bytes(ours.read),
                          bytes(ours.written), bytes(theirs.read), bytes(theirs.written),
                          static_cast<double>(theirs.total()) / static_cast<double>(ours.total()));
    }
    return text;
  }

  std::string text() const {
    const TileMemory memory = memory_of_tile(problem_, element_bytes());
    std::string text =
        fmt::format("Tiled attention · {} · length {}, D {} · tiles of {} x {}\n", tessera_dtype_name(dtype_),
                    options_.length, options_.head_dim, options_.block_m, options_.block_n);
    text += fmt::format(
        "{} tiles: {} full, {} partial, {} skipped\na tile holds {} of shared memory and {} of registers\n",
        tiles_.size(), count(TileKind::kFull), count(TileKind::kPartial), count(TileKind::kSkipped),
        bytes_text(static_cast<double>(memory.shared_bytes)), bytes_text(static_cast<double>(memory.register_bytes)));
    return text + map_text() + row_text() + bytes_text_of();
  }

  const TraceOptions& options_;
  tessera_dtype dtype_;
  std::shared_ptr<ScoreProgram> program_;  // NULL: none
  tessera_plan plan_{};
  TiledProblem problem_;
  std::vector<Tile> tiles_;
  std::int64_t row_ = 0;
  AttentionTensors inputs_, in_float64_;
  std::vector<double> exact_row_, result_;
  std::vector<RowStep> row_steps_;
  double error_o_ = 0, error_lse_ = 0;
  OutputTensors files_;
};

constexpr const char* kFooter =
    R"~(One head of standard normal q, k, v, computed in float64 in FlashAttention's order: tiles of queries outside,
blocks of keys inside. A level's bytes are what the next level, nearer to the arithmetic, reads from it and writes to
it; HBM's are those that `tessera plan` counts. docs/guide/how-it-works.md explains them, and
docs/explore/index.html shows them.

Examples:
  tessera trace
  tessera trace --length 1024 -D 128 --causal --block-m 128 --block-n 128 --row 700
  tessera trace --window 128 0 --scale 0.375 --json
  tessera trace --score-mod "s - 0.1 * abs(i - j)" --mask-mod "i // 100 == j // 100"
  tessera trace --dtype float32 --save trace.safetensors)~";

}  // namespace

void add_trace(CLI::App& program, Outcome& outcome) {
  CLI::App* command = program.add_subcommand("trace", "A tiled attention, step by step: one row, and the bytes moved");
  auto options = std::make_shared<TraceOptions>();
  TraceOptions& o = *options;
  command->add_option("--length", o.length, "Queries, and keys")->check(kInteger)->capture_default_str();
  command->add_option("-D,--head-dim", o.head_dim, "Head size")->check(kInteger)->capture_default_str();
  command->add_option("--block-m", o.block_m, "Queries of a tile")->check(kInteger)->capture_default_str();
  command->add_option("--block-n", o.block_n, "Keys of a block")->check(kInteger)->capture_default_str();
  command->add_option("--dtype", o.dtype, "float32, float16, bfloat16 or float64: of the inputs, and of what is stored")
      ->capture_default_str();
  command->add_option("--row", o.row, "Which query to watch (default: the last)")->check(kInteger);
  command->add_option("--entries", o.entries, "How many entries of its O to show")
      ->check(kInteger)
      ->capture_default_str();
  command->add_option("--seed", o.seed, "Seed of the inputs")->check(kUnsigned)->capture_default_str();
  command->add_option("--save", o.save, "Write q, k, v, o and lse to this .safetensors file")
      ->check(kFileName)
      ->type_name("FILE");
  command->add_flag("--json", o.json, "As JSON");
  o.attention.add_to(*command, {"--scale", "--causal", "--window"});
  o.score.add_to(*command);
  command->footer(kFooter);
  command->callback([options, &outcome] {
    Trace(*options).execute();
    outcome.exit_code = 0;
  });
}

}  // namespace tessera::cli
