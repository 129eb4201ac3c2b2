#include "core/score/definitions.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <random>

namespace tessera::testing {

using core::score::Name;
using core::score::Type;

namespace {

constexpr double kInf = INFINITY;

int64_t mod(int64_t a, int64_t b) { return ((a % b) + b) % b; }
int64_t div(int64_t a, int64_t b) { return (a - mod(a, b)) / b; }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double same(const Pair& p, const World&) { return p.s; }
bool all(const Pair&, const World&) { return true; }
int64_t distance(const Pair& p) { return std::abs(p.q_pos - p.j); }
bool causal(const Pair& p) { return p.j <= p.q_pos; }

}  // namespace

int64_t WorldTensor::offset(const int64_t* index) const {
  int64_t offset = 0;
  for (size_t axis = 0; axis < shape.size(); ++axis) offset = offset * shape[axis] + index[axis];
  return offset;
}

bool WorldTensor::holds(const int64_t* index) const {
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    if (index[axis] < 0 || index[axis] >= shape[axis]) return false;
  }
  return true;
}

double WorldTensor::at(std::initializer_list<int64_t> index) const {
  return data[static_cast<size_t>(offset(std::data(index)))];
}

bool mentions(std::string_view text, std::string_view name) {
  const auto in_word = [&](size_t at) {
    return at < text.size() && (std::isalnum(static_cast<unsigned char>(text[at])) || text[at] == '_');
  };
  for (size_t at = text.find(name); at != std::string_view::npos; at = text.find(name, at + 1)) {
    if ((at == 0 || !in_word(at - 1)) && !in_word(at + name.size())) return true;
  }
  return false;
}

World::World(uint64_t seed, int64_t queries, int64_t keys)
    : World(seed, WorldSizes{.len_q = queries, .len_k = keys}, {}) {}

World::World(uint64_t seed, const WorldSizes& sizes, std::string_view text)
    : batch(sizes.batch), heads(sizes.heads), heads_kv(sizes.heads_kv), len_q(sizes.len_q), len_k(sizes.len_k) {
  std::mt19937_64 random(seed);
  const auto add = [&](const char* name, Type type, std::vector<int64_t> shape, auto draw) {
    if (text.data() && !mentions(text, name)) return;
    WorldTensor& tensor = tensors[name];
    tensor.name.text = name, tensor.name.type = type;
    tensor.name.rank = static_cast<int>(shape.size()), tensor.name.is_tensor = true;
    tensor.shape = shape;
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    for (int64_t n = 0; n < count; ++n) tensor.data.push_back(draw(n));
  };
  std::normal_distribution<float> normal;
  const auto any = [&](int64_t) -> double { return normal(random); };
  const auto positive = [&](int64_t) -> double { return 0.5f + std::fabs(normal(random)); };
  const auto below = [&](int64_t end) {
    return [&random, end](int64_t) -> double { return static_cast<double>(random() % static_cast<uint64_t>(end)); };
  };
  const int64_t most = std::max(len_q, len_k);
  add("cap", Type::kFloat, {heads}, [&](int64_t) { return 5.0; });
  add("slope", Type::kFloat, {heads}, [&](int64_t n) { return std::exp2(-static_cast<double>(n) - 1); });
  add("temperature", Type::kFloat, {heads}, positive);
  add("gain", Type::kFloat, {}, positive);
  add("relative", Type::kFloat, {heads, 2 * most}, any);
  add("bucket", Type::kFloat, {heads, 32}, any);
  add("dense", Type::kFloat, {batch, heads, len_q, len_k}, any);
  add("key_bias", Type::kFloat, {batch, len_k}, any);
  add("query_bias", Type::kFloat, {batch, len_q}, any);
  add("place", Type::kFloat, {most}, any);
  add("block", Type::kFloat, {(most >> 4) + 1, (most >> 4) + 1}, any);
  add("decay", Type::kFloat, {heads}, [&](int64_t n) { return 1 - std::exp2(-5.0 - static_cast<double>(n)); });
  add("id", Type::kInt, {batch, len_k}, below(7));
  add("embedding", Type::kFloat, {7}, any);
  int64_t document = 0;  // runs of about eight tokens, or seven in a sequence
  const uint64_t run = static_cast<uint64_t>(std::max<int64_t>(1, most / 7));
  add("doc", Type::kInt, {batch, most},
      [&](int64_t) -> double { return static_cast<double>(document += random() % run == 0); });
  add("span", Type::kInt, {batch, most},
      [&](int64_t n) -> double { return n / 5 % 3 == 0 ? static_cast<double>(n / 5) : 0.0; });
  add("keep", Type::kBool, {batch, len_k}, below(2));
  add("used", Type::kInt, {batch}, [&](int64_t n) -> double { return static_cast<double>(20 + 30 * n); });
  scalars = {{"t", 1.75}, {"prefix", 9}, {"width", 8}, {"radius", 2}};
}

std::vector<Name> World::names() const {
  std::vector<Name> all;
  for (const auto& [name, tensor] : tensors) all.push_back(tensor.name);
  for (const auto& [name, value] : scalars) all.push_back({name, name == "t" ? Type::kFloat : Type::kInt, 0, false});
  return all;
}

core::score::Bindings World::bindings(const core::score::Program& program) const {
  core::score::Bindings bindings;
  bindings.element = [this, &program](int tensor, const int64_t* index, bool& read) {
    const WorldTensor& t = tensors.at(program.tensors[static_cast<size_t>(tensor)].text);
    read = t.holds(index);
    return read ? t.data[static_cast<size_t>(t.offset(index))] : 0.0;
  };
  bindings.scalar = [this, &program](int scalar) {
    return scalars.at(program.scalars[static_cast<size_t>(scalar)].text);
  };
  return bindings;
}

core::score::Inputs World::pair(int64_t b, int64_t h, int64_t i, int64_t j, double s) const {
  return {.s = s,
          .b = b,
          .h = h,
          .h_kv = h / (heads / heads_kv),
          .i = i,
          .j = j,
          .q_pos = i + len_k - len_q,
          .len_q = len_q,
          .len_k = len_k};
}

#define S [](const Pair& p, const World& w) -> double { (void)p; (void)w; return
#define V [](const Pair& p, const World& w) -> bool { (void)p; (void)w; return
// clang-format off
const std::vector<Definition>& definitions() {
  static const std::vector<Definition> all_definitions = {
      // ---- scores
      {"nothing", "s", "", same, all},
      {"softcap", "50 * tanh(s / 50)", "", S 50 * std::tanh(p.s / 50); }, all},
      {"a learned cap a head", "cap[h] * tanh(s / cap[h])", "", S w("cap", {p.h}) * std::tanh(p.s / w("cap", {p.h})); }, all},
      {"ALiBi", "s - slope[h] * abs(q_pos - j)", "", S p.s - w("slope", {p.h}) * static_cast<double>(distance(p)); }, all},
      {"ALiBi with a sign", "s + slope[h] * (j - q_pos)", "", S p.s + w("slope", {p.h}) * static_cast<double>(p.j - p.q_pos); }, all},
      {"relative position bias", "s + relative[h, i - j + len_k]", "", S p.s + w("relative", {p.h, p.i - p.j + p.len_k}); }, all},
      {"buckets of distances", "s + bucket[h, min(abs(i - j), 31)]", "", S p.s + w("bucket", {p.h, std::min<int64_t>(std::abs(p.i - p.j), 31)}); }, all},
      {"dense bias", "s + dense[b, h, i, j]", "", S p.s + w("dense", {p.b, p.h, p.i, p.j}); }, all},
      {"a learned temperature a head", "s * temperature[h]", "", S p.s * w("temperature", {p.h}); }, all},
      {"a learned gain", "s * gain[]", "", S p.s * w("gain", {}); }, all},
      {"a temperature", "s / t", "", S p.s / w.scalars.at("t"); }, all},
      {"logarithm of the distance", "s - log(1.0 + abs(i - j))", "", S p.s - std::log(1.0 + static_cast<double>(std::abs(p.i - p.j))); }, all},
      {"gate", "s * sigmoid(temperature[h])", "", S p.s * sigmoid(w("temperature", {p.h})); }, all},
      {"every other head", "h % 2 == 0 ? s : 0.5 * s", "", S p.h % 2 == 0 ? p.s : 0.5 * p.s; }, all},
      {"a score that hides", "where(j <= q_pos, s, -inf)", "", S causal(p) ? p.s : -kInf; }, all, false},
      {"squared rectifier", "r = max(s, 0.0); r * r", "", S std::max(p.s, 0.0) * std::max(p.s, 0.0); }, all},
      {"absolute value", "abs(s)", "", S std::fabs(p.s); }, all, false},
      {"decay by distance", "s + log(decay[h]) * (q_pos - j)", "", S p.s + std::log(w("decay", {p.h})) * static_cast<double>(p.q_pos - p.j); }, all},
      {"powers of two", "s * exp2(-0.25 * h)", "", S p.s * std::exp2(-0.25 * static_cast<double>(p.h)); }, all},
      {"exponential", "exp(min(s, 3.0)) - 1", "", S std::exp(std::min(p.s, 3.0)) - 1; }, all, false},
      {"waves of positions", "s + 0.1 * sin(i * 0.5) * cos(j * 0.5)", "", S p.s + 0.1 * std::sin(static_cast<double>(p.i) * 0.5) * std::cos(static_cast<double>(p.j) * 0.5); }, all},
      {"bias of a key", "s + key_bias[b, j]", "", S p.s + w("key_bias", {p.b, p.j}); }, all},
      {"bias of a query", "s + query_bias[b, i]", "", S p.s + w("query_bias", {p.b, p.i}); }, all},
      {"a penalty between documents", "doc[b, i] == doc[b, j] ? s : s - 10.0", "", S w("doc", {p.b, p.i}) == w("doc", {p.b, p.j}) ? p.s : p.s - 10; }, all},
      {"bits of positions", "s + ((i ^ j) & 7) * 0.01", "", S p.s + static_cast<double>((p.i ^ p.j) & 7) * 0.01; }, all},
      {"bias of a block", "s + block[i >> 4, j >> 4]", "", S p.s + w("block", {p.i >> 4, p.j >> 4}); }, all},
      {"steps", "floor(s * 4) / 4", "", S std::floor(p.s * 4) / 4; }, all, false},
      {"normalised", "s * rsqrt(1.0 + s * s)", "", S p.s / std::sqrt(1 + p.s * p.s); }, all},
      {"root", "sqrt(abs(s) + 1.0)", "", S std::sqrt(std::fabs(p.s) + 1); }, all, false},
      {"clamped", "min(max(s, -2.0), 2.0)", "", S std::min(std::max(p.s, -2.0), 2.0); }, all, false},
      {"one tensor twice", "s + place[i] * place[j]", "", S p.s + w("place", {p.i}) * w("place", {p.j}); }, all},
      {"a gather of a gather", "s + embedding[id[b, j]]", "", S p.s + w("embedding", {static_cast<int64_t>(w("id", {p.b, p.j}))}); }, all},
      {"a logarithm that is taken or not", "s > 0.5 ? log(s) : s", "", S p.s > 0.5 ? std::log(p.s) : p.s; }, all, false},
      {"KV heads", "s * (1.0 + h_kv)", "", S p.s * (1.0 + static_cast<double>(p.h_kv)); }, all},
      {"lengths", "s * log(1.0 + len_k) / log(1.0 + len_q)", "", S p.s * std::log(1.0 + static_cast<double>(p.len_k)) / std::log(1.0 + static_cast<double>(p.len_q)); }, all},
      {"three together", "c = 5 * tanh(s / 5); c - slope[h] * abs(q_pos - j) + relative[h, i - j + len_k]", "", S 5 * std::tanh(p.s / 5) - w("slope", {p.h}) * static_cast<double>(distance(p)) + w("relative", {p.h, p.i - p.j + p.len_k}); }, all},
      // ---- masks
      {"causal", "", "j <= q_pos", same, V causal(p); }},
      {"window", "", "j <= q_pos && q_pos - j < 16", same, V causal(p) && p.q_pos - p.j < 16; }},
      {"prefix", "", "j < prefix || j <= q_pos", same, V p.j < 9 || causal(p); }},
      {"documents", "", "j <= q_pos && doc[b, i] == doc[b, j]", same, V causal(p) && w("doc", {p.b, p.i}) == w("doc", {p.b, p.j}); }},
      {"dilated window", "", "(q_pos - j) % 4 == 0 && abs(q_pos - j) < 24", same, V mod(p.q_pos - p.j, 4) == 0 && distance(p) < 24; }},
      {"global tokens", "", "j < 4 || i < 4 || abs(i - j) < 8", same, V p.j < 4 || p.i < 4 || std::abs(p.i - p.j) < 8; }},
      {"neighbours in an image", "", "abs(i // width - j // width) <= radius && abs(i % width - j % width) <= radius", same,
       V std::abs(div(p.i, 8) - div(p.j, 8)) <= 2 && std::abs(mod(p.i, 8) - mod(p.j, 8)) <= 2; }},
      {"blocks on the diagonal", "", "i // 16 == j // 16", same, V p.i / 16 == p.j / 16; }},
      {"spans that see each other", "", "j <= q_pos || (span[b, i] == span[b, j] && span[b, i] > 0)", same,
       V causal(p) || (w("span", {p.b, p.i}) == w("span", {p.b, p.j}) && w("span", {p.b, p.i}) > 0); }},
      {"a truth value a key", "", "keep[b, j]", same, V w("keep", {p.b, p.j}) != 0; }},
      {"keys in use", "", "j < used[b]", same, V static_cast<double>(p.j) < w("used", {p.b}); }},
      {"first keys and a window", "", "j < 4 || q_pos - j < 16", same, V p.j < 4 || p.q_pos - p.j < 16; }},
      {"drawn by arithmetic that wraps", "", "((i * 1103515245 + j * 12345) >> 8) % 3 != 0", same,
       V mod(static_cast<int32_t>(static_cast<uint32_t>(p.i) * 1103515245u + static_cast<uint32_t>(p.j) * 12345u) >> 8, 3) != 0; }},
      {"a mask a head", "", "h < 2 ? j <= q_pos : abs(i - j) <= 8", same, V p.h < 2 ? causal(p) : std::abs(p.i - p.j) <= 8; }},
      {"not", "", "!(j > q_pos) & ~(keep[b, j] == false)", same, V causal(p) && w("keep", {p.b, p.j}) != 0; }},
      {"a tensor that is only in range where it is read", "", "i < 7 && embedding[i] > 0.0", same, V p.i < 7 && w("embedding", {p.i}) > 0; }},
      // ---- both
      {"score and mask", "s + key_bias[b, j]", "j <= q_pos && keep[b, j]", S p.s + w("key_bias", {p.b, p.j}); }, V causal(p) && w("keep", {p.b, p.j}) != 0; }},
  };
  return all_definitions;
}
// clang-format on

std::string name_for_tests(size_t definition) {
  std::string name;
  for (const char c : std::string(definitions()[definition].name)) {
    if (std::isalnum(static_cast<unsigned char>(c))) name += c;
  }
  return name;
}

}  // namespace tessera::testing
