// What an option costs a call on a GPU: tree masks, causal flags and CSR page tables beside the call without them, and a shared
// prefix read once (by prefix_groups, and by two calls and tessera_combine) beside one call that reads it for every sequence. bfloat16, keys in pages,
// graph replays in turns, medians. Built by g++ against the library, with bench/ among the include paths:
//
//   masks [rounds] [part of a cell's name] > masks.csv
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gpu_call.hpp"

namespace {

using namespace bench;

constexpr int kCallsAGraph = 10;

void* upload(const void* from, size_t bytes) {
  unsigned long long address = 0;
  driver("cuMemAlloc_v2", &address, std::max<size_t>(bytes, 16));
  driver("cuMemcpyHtoD_v2", address, from, bytes);
  return reinterpret_cast<void*>(address);
}
template <class T>
T* upload(const std::vector<T>& from) {
  return static_cast<T*>(upload(from.data(), from.size() * sizeof(T)));
}

uint16_t bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bf16(uint16_t value) {
  const uint32_t bits = uint32_t{value} << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// Normal numbers, a million of them over and over.
uint16_t* normal(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw;
  std::vector<uint16_t> some(size_t{1} << 20), all(count);
  for (uint16_t& x : some) x = bf16(draw(random));
  for (size_t n = 0; n < count; ++n) all[n] = some[(n + n / some.size() * 4099) % some.size()];
  return upload(all);
}

struct Shape {
  int64_t batch, queries, keys, heads = 32, heads_kv = 8, head_dim = 128, page = 64;
  int64_t pages() const { return (keys + page - 1) / page; }
  int64_t tokens() const { return batch * queries; }
};

// A call with its tensors on the GPU. q, k and v may be another's.
struct Call {
  tessera_problem problem;
  tessera_buffers buffers{};
  tessera_plan plan{};
  void* workspace = nullptr;

  explicit Call(const Shape& s, int64_t pool_pages) {
    tessera_problem_init(&problem);
    problem.q = problem.o = layout(TESSERA_BFLOAT16, {s.tokens(), s.heads, s.head_dim});
    problem.k = problem.v = layout(TESSERA_BFLOAT16, {pool_pages, s.page, s.heads_kv, s.head_dim});
    problem.lse = layout(TESSERA_FLOAT32, {s.heads, s.tokens()});
    problem.cu_seqlens_q = layout(TESSERA_INT32, {s.batch + 1});
    problem.seqused_k = layout(TESSERA_INT32, {s.batch});
    problem.max_seqlen_q = s.queries, problem.max_seqlen_k = s.keys;
  }
  void make_plan(const tessera_device& device) {
    check(tessera_make_plan(&problem, &device, &plan));
    const std::vector<char> zeros(tessera_workspace_bytes(&plan) + 64);
    workspace = upload(zeros);
  }
  void run(void* stream) const {
    tessera_executor executor{};
    executor.stream = stream;
    check(tessera_forward(&plan, &buffers, workspace, tessera_workspace_bytes(&plan), &executor));
  }
};

std::vector<int32_t> offsets(int64_t batch, int64_t each) {
  std::vector<int32_t> result;
  for (int64_t b = 0; b <= batch; ++b) result.push_back(static_cast<int32_t>(b * each));
  return result;
}

struct Contestant {
  std::string name;
  std::function<void(void*)> run;
  void* graph = nullptr;
  std::vector<double> microseconds;
};

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// The first is what the others are held against.
void contest(const char* cell, std::vector<Contestant> contestants, int rounds, void* stream) {
  void *start = nullptr, *end = nullptr;
  driver("cuEventCreate", &start, 0u);
  driver("cuEventCreate", &end, 0u);
  for (Contestant& c : contestants) {
    for (int warm = 0; warm < 3; ++warm) c.run(stream);
    driver("cuStreamSynchronize", stream);
    void* graph = nullptr;
    driver("cuStreamBeginCapture_v2", stream, 2);
    for (int n = 0; n < kCallsAGraph; ++n) c.run(stream);
    driver("cuStreamEndCapture", stream, &graph);
    driver("cuGraphInstantiateWithFlags", &c.graph, graph, 0ull);
    driver("cuGraphLaunch", c.graph, stream);
  }
  driver("cuStreamSynchronize", stream);
  for (int round = 0; round < rounds; ++round) {
    for (Contestant& c : contestants) {
      driver("cuGraphLaunch", c.graph, stream);
      driver("cuEventRecord", start, stream);
      driver("cuGraphLaunch", c.graph, stream);
      driver("cuEventRecord", end, stream);
      driver("cuEventSynchronize", end);
      float ms = 0;
      driver("cuEventElapsedTime", &ms, start, end);
      c.microseconds.push_back(ms * 1000 / kCallsAGraph);
    }
  }
  const double base = median(contestants[0].microseconds);
  for (const Contestant& c : contestants) {
    const double us = median(c.microseconds);
    std::printf("%s,%s,%.2f,%.3f\n", cell, c.name.c_str(), us, us / base);
  }
  std::fflush(stdout);
}

std::vector<uint16_t> fetch(const void* from, size_t count) {
  std::vector<uint16_t> result(count);
  driver("cuMemcpyDtoH_v2", static_cast<void*>(result.data()), reinterpret_cast<unsigned long long>(from), count * 2);
  return result;
}

struct World {
  tessera_device device{};
  void* stream = nullptr;
  int rounds = 9;
  std::string wanted;  // of a cell's name
  bool wants(const char* cell) const { return std::strstr(cell, wanted.c_str()) != nullptr; }
};

// Tables of pages of their own, in random order.
std::vector<int32_t> own_pages(const Shape& s) {
  std::vector<int32_t> table(static_cast<size_t>(s.batch * s.pages()));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(7));
  return table;
}

// Trees of drafted tokens, flags and lists of pages, beside the plain causal call.
void masks(const char* name, const Shape& s, const World& world) {
  if (!world.wants(name)) return;
  const int64_t pool = s.batch * s.pages();
  const size_t kv = static_cast<size_t>(pool * s.page * s.heads_kv * s.head_dim);
  uint16_t *q = normal(static_cast<size_t>(s.tokens() * s.heads * s.head_dim), 1), *k = normal(kv, 2),
           *v = normal(kv, 3);
  const std::vector<int32_t> table = own_pages(s);
  Call plain(s, pool);
  plain.problem.page_table = layout(TESSERA_INT32, {s.batch, s.pages()});
  plain.problem.causal = 1;
  tessera_buffers& b = plain.buffers;
  b.q = q, b.k = k, b.v = v;
  b.o = normal(static_cast<size_t>(s.tokens() * s.heads * s.head_dim), 4);
  b.lse = reinterpret_cast<float*>(normal(static_cast<size_t>(s.tokens() * s.heads * 2), 5));
  b.cu_seqlens_q = upload(offsets(s.batch, s.queries));
  b.seqused_k = upload(std::vector<int32_t>(static_cast<size_t>(s.batch), static_cast<int32_t>(s.keys)));
  b.page_table = upload(table);

  const int64_t words = (s.queries + 31) / 32;
  std::vector<int32_t> bits(static_cast<size_t>(s.tokens() * words));
  std::mt19937 random(9);
  for (int32_t& word : bits) word = static_cast<int32_t>(random() & random());
  Call tree = plain, flags = plain, csr = plain, free = plain;
  tree.problem.tree_mask = layout(TESSERA_INT32, {s.tokens(), words});
  tree.buffers.tree_mask = upload(bits);
  free.problem.causal = 0;
  Call free_tree = free;
  free_tree.problem.tree_mask = tree.problem.tree_mask, free_tree.buffers.tree_mask = tree.buffers.tree_mask;
  flags.problem.causal = 0;
  flags.problem.causal_seqs = layout(TESSERA_BOOL, {s.batch});
  flags.buffers.causal_seqs = upload(std::vector<uint8_t>(static_cast<size_t>(s.batch), 1));
  csr.problem.page_table = {};
  csr.problem.page_indptr = layout(TESSERA_INT32, {s.batch + 1});
  csr.problem.page_indices = layout(TESSERA_INT32, {pool});
  csr.buffers.page_indptr = upload(offsets(s.batch, s.pages()));
  csr.buffers.page_indices = upload(table);
  std::vector<Contestant> contestants;
  for (auto& [call, what] : {std::pair<Call*, const char*>{&plain, "causal"},
                             {&tree, "causal and tree"},
                             {&flags, "causal_seqs"},
                             {&csr, "causal csr"},
                             {&free, "full"},
                             {&free_tree, "tree"}}) {
    call->make_plan(world.device);
    contestants.push_back({std::string(what) + " " + tessera_kernel_name(call->plan.kernel),
                           [call = call](void* stream) { call->run(stream); },
                           nullptr,
                           {}});
  }
  contest(name, contestants, world.rounds, world.stream);
  for (const void* memory : {static_cast<const void*>(q), static_cast<const void*>(k), static_cast<const void*>(v)}) {
    driver("cuMemFree_v2", reinterpret_cast<unsigned long long>(memory));
  }
}

// "fwd_sm90 in 8 and fwd_sm80 in 1"
std::string parts_of(const tessera_plan& plan) {
  const auto part = [&](int n) {
    return tessera_kernel_name(plan.parts[n].kernel) + std::string(" in ") + std::to_string(plan.parts[n].num_splits);
  };
  return part(0) + " and " + part(1);
}

// `batch` sequences with `prefix` keys in the same pages and `own` of their own.
void shared_prefix(const char* name, const Shape& s, int64_t prefix, const World& world) {
  if (!world.wants(name)) return;
  const int64_t prefix_pages = prefix / s.page, own_page_count = s.pages() - prefix_pages;
  const int64_t pool = prefix_pages + s.batch * own_page_count;
  const size_t kv = static_cast<size_t>(pool * s.page * s.heads_kv * s.head_dim);
  std::vector<int32_t> table;
  for (int64_t row = 0; row < s.batch; ++row) {
    for (int64_t n = 0; n < s.pages(); ++n) {
      table.push_back(static_cast<int32_t>(n < prefix_pages ? n : n + row * own_page_count));
    }
  }
  const size_t outputs = static_cast<size_t>(s.tokens() * s.heads * s.head_dim);
  Call plain(s, pool);
  plain.problem.page_table = layout(TESSERA_INT32, {s.batch, s.pages()});
  plain.problem.causal = 1;
  tessera_buffers& b = plain.buffers;
  b.q = normal(outputs, 1), b.k = normal(kv, 2), b.v = normal(kv, 3), b.o = normal(outputs, 4);
  b.lse = reinterpret_cast<float*>(normal(static_cast<size_t>(s.tokens() * s.heads * 2), 5));
  b.cu_seqlens_q = upload(offsets(s.batch, s.queries));
  b.seqused_k = upload(std::vector<int32_t>(static_cast<size_t>(s.batch), static_cast<int32_t>(s.keys)));
  b.page_table = upload(table);
  plain.make_plan(world.device);

  auto* parts = normal(2 * outputs, 6);
  auto* lses = reinterpret_cast<float*>(normal(static_cast<size_t>(4 * s.tokens() * s.heads), 7));
  Shape of_prefix = s, of_own = s;
  of_prefix.batch = 1, of_prefix.queries = s.tokens(), of_prefix.keys = prefix;
  of_own.keys = s.keys - prefix;
  Call common(of_prefix, pool), own(of_own, pool);
  common.buffers = own.buffers = plain.buffers;
  common.problem.page_table = plain.problem.page_table;
  common.problem.page_table.shape[0] = 1, common.problem.page_table.shape[1] = prefix_pages;
  common.buffers.cu_seqlens_q = upload(offsets(1, s.tokens()));
  common.buffers.seqused_k = upload(std::vector<int32_t>{static_cast<int32_t>(prefix)});
  common.buffers.o = parts, common.buffers.lse = lses;
  own.problem.page_table = plain.problem.page_table;
  own.problem.page_table.shape[1] = own_page_count;
  own.problem.causal = 1;
  own.buffers.page_table = plain.buffers.page_table + prefix_pages;
  own.buffers.seqused_k = upload(std::vector<int32_t>(static_cast<size_t>(s.batch), static_cast<int32_t>(of_own.keys)));
  own.buffers.o = parts + outputs, own.buffers.lse = lses + s.tokens() * s.heads;
  Call own_decoded = own;
  tessera_device decoding = world.device;
  decoding.kernel = TESSERA_KERNEL_DECODE_SM90;
  common.make_plan(world.device), own.make_plan(world.device), own_decoded.make_plan(decoding);
  void* const merged = normal(outputs, 8);
  Call once(s, pool);
  once.problem = plain.problem;
  once.problem.prefix_groups = layout(TESSERA_INT32, {2}), once.problem.prefix_lens = layout(TESSERA_INT32, {1});
  once.problem.max_prefix_k = prefix, once.problem.max_suffix_k = s.keys - prefix;
  once.buffers = plain.buffers;
  once.buffers.o = normal(outputs, 9);
  once.buffers.prefix_groups = upload(std::vector<int32_t>{0, static_cast<int32_t>(s.batch)});
  once.buffers.prefix_lens = common.buffers.seqused_k;
  once.make_plan(world.device);
  tessera_combine_call merge{};
  merge.o_parts = {layout(TESSERA_BFLOAT16, {2, 1, s.tokens(), s.heads, s.head_dim}), parts};
  merge.lse_parts = {layout(TESSERA_FLOAT32, {2, 1, s.heads, s.tokens()}), lses};
  merge.o = {layout(TESSERA_BFLOAT16, {1, s.tokens(), s.heads, s.head_dim}), merged};
  const auto cascade = [&](void* stream) {
    tessera_executor executor{};
    executor.stream = stream;
    common.run(stream), own.run(stream);
    check(tessera_combine(&merge, &world.device, &executor));
  };
  contest(name,
          {{std::string("one call ") + tessera_kernel_name(plain.plan.kernel),
            [&](void* stream) { plain.run(stream); },
            nullptr,
            {}},
           {std::string("prefix once: ") + tessera_kernel_name(common.plan.kernel) + " and " +
                tessera_kernel_name(own.plan.kernel),
            cascade,
            nullptr,
            {}},
           {"one call, prefix read once: " + parts_of(once.plan), [&](void* stream) { once.run(stream); }, nullptr, {}},
           {"prefix alone", [&](void* stream) { common.run(stream); }, nullptr, {}},
           {"own keys alone", [&](void* stream) { own.run(stream); }, nullptr, {}},
           {"own keys alone by decode_sm90", [&](void* stream) { own_decoded.run(stream); }, nullptr, {}}},
          world.rounds, world.stream);
  const std::vector<uint16_t> expected = fetch(plain.buffers.o, outputs);
  const auto compare = [&](const char* what, const void* with) {
    const std::vector<uint16_t> got = fetch(with, outputs);
    double difference = 0, norm = 0;
    for (size_t n = 0; n < outputs; ++n) {
      const double x = from_bf16(expected[n]), y = from_bf16(got[n]);
      difference += (x - y) * (x - y), norm += x * x;
    }
    std::printf("%s,%s,%.3e,\n", name, what, std::sqrt(difference / norm));
  };
  compare("relative difference", merged), compare("relative difference of one call", once.buffers.o);
}

}  // namespace

int main(int argc, char** argv) {
  World world;
  if (argc > 1) world.rounds = std::atoi(argv[1]);
  if (argc > 2) world.wanted = argv[2];
  make_context();
  world.stream = make_stream();
  check(tessera_device_cuda(0, &world.device));
  std::printf("cell,call,microseconds,ratio\n");
  masks("16 x 8 queries x 8192 keys", {16, 8, 8192}, world);
  masks("16 x 32 queries x 8192 keys", {16, 32, 8192}, world);
  masks("16 x 64 queries x 8192 keys", {16, 64, 8192}, world);
  masks("4 x 256 queries x 4096 keys", {4, 256, 4096}, world);
  masks("64 x 1 queries x 4096 keys, pages of 16", {64, 1, 4096, 32, 8, 128, 16}, world);
  masks("4 x 2048 queries x 2048 keys", {4, 2048, 2048}, world);
  shared_prefix("64 x 1 query x (8192 common + 256 own)", {64, 1, 8448}, 8192, world);
  shared_prefix("64 x 1 query x (8192 common + 256 own), 8 heads over 8", {64, 1, 8448, 8, 8}, 8192, world);
  shared_prefix("256 x 1 query x (2048 common + 256 own)", {256, 1, 2304}, 2048, world);
  shared_prefix("16 x 1 query x (32768 common + 512 own)", {16, 1, 33280}, 32768, world);
  return 0;
}
