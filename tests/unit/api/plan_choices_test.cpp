// Which kernels plans choose, compared with plan_choices.txt: the cells of bench/ and drawn problems, on every kind of
// device. A line is a number and a problem; "=number devices: choice; devices: choice" says what a number means. After
// a change that is meant to alter choices, this writes the list again, and its diff shows what has changed:
//   TESSERA_WRITE_CHOICES=tests/unit/api/plan_choices.txt unit_tests --gtest_filter=PlanChoices.*
// With TESSERA_DRAWN_PROBLEMS=20000 it draws more problems than the list has.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tessera/tessera.hpp"

namespace tessera {
namespace {

// ---- problems as text -----------------------------------------------------------------------------------------------

enum class Form { kDense, kPacked, kPaged, kCache };  // kPaged: dense queries; kCache: packed ones
constexpr const char* kForms[] = {"dense", "packed", "paged", "cache"};
constexpr std::pair<const char*, DType> kDtypes[] = {{"f32", float32}, {"f16", float16}, {"bf16", bfloat16}};

// A line's problem: "fwd bf16 cache B=16 q=8 k=4096 h=32/8 d=128/128 t=24 page=16 causal".
struct Case {
  bool backward = false;
  DType dtype = bfloat16;
  Form form = Form::kDense;
  int64_t batch = 1, queries = 1, keys = 1, heads = 1, heads_kv = 1, head_dim = 64, head_dim_v = 64;
  int64_t tokens = 0;  // packed: of all sequences
  int64_t page = 0;
  std::vector<std::string> options;

  std::string text() const {
    std::ostringstream out;
    out << (backward ? "bwd " : "fwd ");
    for (const auto& [name, value] : kDtypes) out << (value == dtype ? name : "");
    out << ' ' << kForms[static_cast<int>(form)] << " B=" << batch << " q=" << queries << " k=" << keys
        << " h=" << heads << '/' << heads_kv << " d=" << head_dim << '/' << head_dim_v;
    if (tokens > 0) out << " t=" << tokens;
    if (page > 0) out << " page=" << page;
    for (const std::string& option : options) out << ' ' << option;
    return out.str();
  }

  static Case of(const std::string& text) {
    Case result;
    std::istringstream in(text);
    std::string direction, dtype, form, word;
    in >> direction >> dtype >> form;
    result.backward = direction == "bwd";
    for (const auto& [name, value] : kDtypes) {
      if (dtype == name) result.dtype = value;
    }
    result.form = static_cast<Form>(std::ranges::find(kForms, form) - std::begin(kForms));
    while (in >> word) {
      const size_t equals = word.find('='), slash = word.find('/');
      const std::string name = word.substr(0, equals);
      const auto number = [&](size_t at) { return std::strtoll(word.c_str() + at, nullptr, 10); };
      if (name == "B")
        result.batch = number(equals + 1);
      else if (name == "q")
        result.queries = number(equals + 1);
      else if (name == "k")
        result.keys = number(equals + 1);
      else if (name == "h")
        result.heads = number(equals + 1), result.heads_kv = number(slash + 1);
      else if (name == "d")
        result.head_dim = number(equals + 1), result.head_dim_v = number(slash + 1);
      else if (name == "t")
        result.tokens = number(equals + 1);
      else if (name == "page")
        result.page = number(equals + 1);
      else
        result.options.push_back(word);
    }
    return result;
  }

  Problem problem() const;
};

Problem Case::problem() const {
  const bool packed_q = form == Form::kPacked || form == Form::kCache;
  Problem p;
  const auto rows = [&](bool packed, int64_t count, int64_t of_heads, int64_t columns) {
    return packed ? layout(dtype, {packed_q && tokens > 0 ? tokens : batch * count, of_heads, columns})
                  : layout(dtype, {batch, count, of_heads, columns});
  };
  p.q = rows(packed_q, queries, heads, head_dim), p.o = rows(packed_q, queries, heads, head_dim_v);
  if (packed_q) p.cu_seqlens_q = layout(int32, {batch + 1}), p.max_seqlen_q = queries;
  if (page > 0) {
    const int64_t pages = (keys + page - 1) / page;
    p.k = layout(dtype, {batch * pages, page, heads_kv, head_dim});
    p.v = layout(dtype, {batch * pages, page, heads_kv, head_dim_v});
    p.page_table = layout(int32, {batch, pages}), p.seqused_k = layout(int32, {batch}), p.max_seqlen_k = keys;
  } else if (form == Form::kPacked) {
    const int64_t total = tokens > 0 && queries == keys ? tokens : batch * keys;
    p.k = layout(dtype, {total, heads_kv, head_dim}), p.v = layout(dtype, {total, heads_kv, head_dim_v});
    p.cu_seqlens_k = layout(int32, {batch + 1}), p.max_seqlen_k = keys;
  } else {
    p.k = layout(dtype, {batch, keys, heads_kv, head_dim}), p.v = layout(dtype, {batch, keys, heads_kv, head_dim_v});
    if (form == Form::kCache) p.seqused_k = layout(int32, {batch});
  }
  const auto scores = [&](DType of) { return layout(of, {1, heads, queries, keys}); };
  for (const std::string& option : options) {
    const size_t equals = option.find('=');
    const std::string name = option.substr(0, equals);
    const int64_t value = equals == std::string::npos ? 0 : std::strtoll(option.c_str() + equals + 1, nullptr, 10);
    if (name == "causal") p.causal = 1;
    if (name == "window") p.window_left = value, p.window_right = p.causal ? -1 : value;
    if (name == "softcap") p.softcap = static_cast<double>(value);
    if (name == "dropout") p.dropout_p = 0.25;
    if (name == "invariant") p.batch_invariant = 1;
    if (name == "deterministic") p.deterministic = 1;
    if (name == "lengths" && page == 0) p.seqused_k = layout(int32, {batch});
    if (name == "bias") p.bias = scores(dtype);
    if (name == "mask") p.mask = scores(boolean);
    if (name == "alibi") p.alibi_slopes = layout(float32, {heads});
    if (name == "sink") p.sink = layout(float32, {heads});
    if (name == "d_bias") p.d_bias = layout(float32, {1, heads, queries, keys});
    if (name == "blocks") {
      p.mask_block_q = p.mask_block_k = value;
      p.block_mask = layout(boolean, {1, heads, (queries + value - 1) / value, (keys + value - 1) / value});
    }
    if (name == "tree") {
      p.tree_mask =
          packed_q ? layout(int32, {tokens > 0 ? tokens : batch * queries, 1}) : layout(int32, {batch, queries, 1});
    }
    if (name == "prefix") {
      p.prefix_groups = layout(int32, {2}), p.prefix_lens = layout(int32, {1});
      p.max_prefix_k = value, p.max_suffix_k = keys - value;
    }
    if (name == "heads_first") {  // [B, H, S, D]
      for (Layout* of : {&p.q, &p.k, &p.v, &p.o}) {
        if (of->rank != 4 || (page > 0 && of != &p.q && of != &p.o)) continue;
        of->strides[2] = of->shape[1] * of->shape[3], of->strides[1] = of->shape[3];
      }
    }
    if (name == "padded") {  // rows that begin at no multiple of 16 bytes
      for (Layout* of : {&p.q, &p.k, &p.v, &p.o}) {
        for (int axis = 0; axis + 1 < of->rank; ++axis)
          of->strides[axis] = of->strides[axis] / of->shape[of->rank - 1] * (of->shape[of->rank - 1] + 1);
      }
    }
  }
  return backward ? gradient_of(p) : p;
}

// ---- drawn problems -------------------------------------------------------------------------------------------------

class Draw {
 public:
  explicit Draw(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t end) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(end)); }
  bool one_in(int64_t count) { return below(count) == 0; }
  template <class T>
  T of(std::initializer_list<T> all) {
    return all.begin()[below(static_cast<int64_t>(all.size()))];
  }
  // A power of two below 2^bits, or a number near it.
  int64_t size(int64_t least_bits, int64_t bits) {
    const int64_t power = int64_t{1} << (least_bits + below(bits - least_bits));
    return one_in(2) ? power : power + below(power);
  }

 private:
  std::mt19937_64 engine_;
};

Case drawn_case(Draw& draw) {
  Case c;
  c.backward = draw.one_in(6);
  c.dtype = draw.one_in(8) ? float32 : draw.one_in(3) ? float16 : bfloat16;
  c.form = c.backward ? draw.of({Form::kDense, Form::kPacked})
                      : draw.of({Form::kDense, Form::kPacked, Form::kPaged, Form::kCache, Form::kCache});
  c.batch = draw.one_in(3) ? 1 : draw.size(0, 8);
  c.heads_kv = draw.of({1, 2, 4, 8, 8, 16, 32});
  c.heads = c.heads_kv * draw.of({1, 1, 2, 3, 4, 4, 6, 8, 16});
  c.head_dim = draw.of({32, 64, 64, 80, 96, 128, 128, 128, 192, 256, 320, 512});
  c.head_dim_v = draw.one_in(12) ? draw.of({64, 128}) : c.head_dim;
  c.keys = draw.one_in(5) ? draw.size(0, 9) : draw.size(7, 15);
  switch (draw.below(4)) {
    case 0:
      c.queries = 1;
      break;
    case 1:
      c.queries = draw.size(0, 7);
      break;
    case 2:
      c.queries = draw.size(4, 12);
      break;
    default:
      c.queries = c.keys;
  }
  c.queries = std::min(c.queries, c.keys);
  const bool packed = c.form == Form::kPacked || c.form == Form::kCache;
  if (packed && !draw.one_in(3)) {  // some sequences with all of the queries, the others with few
    const int64_t many = 1 + draw.below(c.batch);
    c.tokens = many * c.queries + (c.batch - many) * std::min(c.queries, draw.of<int64_t>({1, 1, 2, 8}));
  }
  if (c.form == Form::kPaged || (c.form == Form::kCache && !draw.one_in(5))) c.page = draw.of({16, 16, 64, 256, 1, 8});
  const auto option = [&](int64_t one_in, const char* text) {
    if (draw.one_in(one_in)) c.options.emplace_back(text);
  };
  option(2, "causal");
  option(8, "window=500");
  option(12, "softcap=30");
  option(20, "alibi");
  option(16, "sink");
  if (!packed) option(16, "bias"), option(16, "mask");
  if (!packed && c.page == 0) option(16, "blocks=128");
  if (c.form == Form::kDense) option(6, "lengths"), option(8, "heads_first"), option(20, "padded");
  option(20, "dropout");
  if (c.backward) {
    option(4, "deterministic");
    return c;
  }
  option(5, "invariant");
  option(24, "tree");
  if (c.batch > 1 && c.keys > 64 && c.options.size() < 2 && draw.one_in(3)) {
    c.options = {"causal", "prefix=" + std::to_string(c.keys * draw.of({1, 3, 7}) / 8 / 64 * 64)};
  }
  return c;
}

// ---- choices --------------------------------------------------------------------------------------------------------

struct NamedDevice {
  std::string name;
  tessera_device device;
};

std::vector<NamedDevice> devices() {
  std::vector<NamedDevice> all;
  const auto gpu = [&](const char* name, int32_t arch, int32_t cores) {
    all.push_back({name, cuda_arch(arch)});
    all.back().device.cores = cores;
  };
  gpu("h100", 90, 132), gpu("h100_pcie", 90, 114), gpu("h200", 90, 132), gpu("a100", 80, 108), gpu("rtx4090", 89, 128);
  gpu("sm100", 100, 148), gpu("sm120", 120, 170);
  std::snprintf(all[2].device.name, sizeof all[2].device.name, "NVIDIA H200");
  const auto cpu = [&](int32_t isa, int32_t vector_isa, int32_t cores) {
    tessera_device device{};
    device.isa = device.isa_limit = isa, device.vector_isa = vector_isa;
    device.cores = device.threads = cores;
    device.l1_bytes = 32 << 10, device.l2_bytes = 1 << 20;
    all.push_back(
        {tessera_isa_name(isa) + std::string(vector_isa ? "+vectors" : "") + (cores > 8 ? "_64" : ""), device});
  };
  for (int32_t isa = TESSERA_ISA_BASELINE; isa <= TESSERA_ISA_AMX_BF16; ++isa) cpu(isa, 0, 8);
  cpu(TESSERA_ISA_AMX_BF16, TESSERA_ISA_AVX512, 8);
  cpu(TESSERA_ISA_AVX512_BF16, 0, 64);
  return all;
}

// The kernel, and what it launches if it is made of others: "mixed_sm90(live_tiles fwd_sm90 decode_sm90)"; on a CPU
// its instruction set, too.
std::string choice(const Problem& problem, const tessera_device& device) {
  Plan plan;
  if (!try_plan(problem, device, plan).ok()) return "none";
  std::string text = tessera_kernel_name(plan.kernel), inside;
  const auto add = [&](const std::string& name) { inside += (inside.empty() ? "" : " ") + name; };
  if (text == "mixed_sm90" || text == "shared_prefix") {
    for (const tessera_launch& launch : launches(plan)) add(launch.kernel);
  }
  if (text == "shared_prefix") {
    const auto description = nlohmann::json::parse(json(plan));
    for (const auto& step : description["steps"]) {
      if (step.contains("keys") && (!step.contains("sequences") || step["sequences"] == "many queries"))
        add(step["kernel"]);
    }
  }
  if (!inside.empty()) text += "(" + inside + ")";
  if (device.backend == TESSERA_BACKEND_CPU) text += std::string("/") + tessera_isa_name(plan.device.isa);
  return text;
}

// "h100 h200: fwd_sm90; a100: fwd_sm80"
std::string choices(const std::string& text, const std::vector<NamedDevice>& all) {
  const Problem problem = Case::of(text).problem();
  std::vector<std::pair<std::string, std::string>> groups;  // choice, devices
  for (const NamedDevice& named : all) {
    const std::string chosen = choice(problem, named.device);
    const auto found = std::ranges::find(groups, chosen, [](const auto& group) { return group.first; });
    if (found == groups.end()) {
      groups.emplace_back(chosen, named.name);
    } else {
      found->second += " " + named.name;
    }
  }
  std::string line;
  for (const auto& [chosen, names] : groups) line += (line.empty() ? "" : "; ") + names + ": " + chosen;
  return line;
}

constexpr const char* kFile = TESSERA_PLAN_CHOICES;
constexpr const char* kDrawn = "# drawn";
constexpr uint64_t kSeed = 46;
constexpr size_t kDrawnProblems = 500;

struct List {
  std::vector<std::string> comments, problems, choices;
};

List read_list() {
  List list;
  std::map<std::string, std::string> legend;
  std::ifstream file(kFile);
  for (std::string line; std::getline(file, line);) {
    const size_t space = line.find(' ');
    if (line == kDrawn) continue;
    if (line.starts_with('#')) {
      list.comments.push_back(line);
    } else if (line.starts_with('=')) {
      legend[line.substr(1, space - 1)] = line.substr(space + 1);
    } else {
      list.problems.push_back(line.substr(space + 1));
      list.choices.push_back(legend[line.substr(0, space)]);
    }
  }
  return list;
}

void write_list(const List& list, size_t cells, const char* path) {
  std::ofstream out(path);
  std::map<std::string, size_t> legend;
  for (const std::string& comment : list.comments) out << comment << '\n';
  for (size_t n = 0; n < list.problems.size(); ++n) {
    if (n == cells) out << kDrawn << '\n';
    const auto [found, is_new] = legend.try_emplace(list.choices[n], legend.size() + 1);
    if (is_new) out << '=' << found->second << ' ' << found->first << '\n';
    out << found->second << ' ' << list.problems[n] << '\n';
  }
}

TEST(PlanChoices, AreThoseOfTheList) {
  const char* const write_to = std::getenv("TESSERA_WRITE_CHOICES");
  const char* const drawn = write_to ? std::getenv("TESSERA_DRAWN_PROBLEMS") : nullptr;
  const List expected = read_list();
  ASSERT_GT(expected.problems.size(), kDrawnProblems) << kFile;
  List now = expected;
  const size_t cells = expected.problems.size() - kDrawnProblems;
  now.problems.resize(cells);
  Draw draw(kSeed);
  const size_t count = drawn ? std::strtoull(drawn, nullptr, 10) : kDrawnProblems;
  for (size_t n = 0; n < count; ++n) now.problems.push_back(drawn_case(draw).text());
  const std::vector<NamedDevice> all = devices();
  now.choices.clear();
  for (const std::string& problem : now.problems) now.choices.push_back(choices(problem, all));
  if (write_to) return write_list(now, cells, write_to);
  for (size_t n = 0; n < expected.problems.size(); ++n) {
    EXPECT_EQ(now.problems[n], expected.problems[n]) << "the generator draws other problems";
    EXPECT_EQ(now.choices[n], expected.choices[n]) << expected.problems[n];
  }
}

}  // namespace
}  // namespace tessera
