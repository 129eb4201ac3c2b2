// Attention on several ranks, which are threads of this process: forward and backward against float64 and against one
// rank, for every strategy and layout.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "error_bound.hpp"
#include "execute.hpp"
#include "failing_allocation.hpp"
#include "gpu_memory.hpp"
#include "plain.hpp"
#include "tessera/distributed.hpp"

namespace tessera::testing {
namespace {

struct Setting {
  std::string strategy = "ring", layout = "zig_zag";
  int32_t ranks = 2, head_ranks = 0;
  std::vector<int64_t> lengths = {};   // of packed sequences; empty: the case's Sq
  std::string forward_by = {};         // the only kernel family; there is then no backward pass
  tessera_program* program = nullptr;  // instead of the case's, and its tensors and scalars
  std::vector<Tensor> captured = {};
  std::vector<double> scalars = {};

  std::string text() const {
    return strategy + " " + layout + " ranks " + std::to_string(ranks) + " head_ranks " + std::to_string(head_ranks) +
           (forward_by.empty() ? "" : " by " + forward_by);
  }
};

int32_t value_of(const std::string& name, const char* (*name_of)(int32_t)) {
  for (int32_t value = 0; value < 8; ++value) {
    if (name == name_of(value)) return value;
  }
  ADD_FAILURE() << name;
  return 0;
}

// A case's problem on some ranks. `lengths` lies in `setting`, or in `whole`.
tessera_ranks_problem problem_of(const Case& c, const Setting& setting, const int64_t& whole) {
  tessera_ranks_problem p;
  tessera_ranks_problem_init(&p);
  p.ranks = setting.ranks, p.head_ranks = setting.head_ranks;
  p.strategy = value_of(setting.strategy, tessera_strategy_name);
  p.layout = value_of(setting.layout, tessera_rank_layout_name);
  p.direction = setting.forward_by.empty() ? TESSERA_BACKWARD : TESSERA_FORWARD;
  p.dtype = static_cast<int32_t>(c.dtype);
  p.causal = static_cast<int32_t>(c.causal), p.window_left = c.wl, p.window_right = c.wr;
  p.lengths = &whole, p.num_sequences = 1, p.batch = c.b;
  if (!setting.lengths.empty()) {
    p.lengths = setting.lengths.data(), p.num_sequences = static_cast<int64_t>(setting.lengths.size());
    p.chunk_rows = 32;
  }
  p.heads_q = c.hq, p.heads_kv = c.hkv, p.head_dim = c.d, p.head_dim_v = c.dv;
  return p;
}

RanksOptions options_of(const Call& call, const Setting& setting) {
  RanksOptions options{};
  options.program = setting.program ? setting.program : call.program.get();
  const std::vector<Tensor>& captured = setting.program ? setting.captured : call.captured;
  for (size_t n = 0; n < captured.size(); ++n) options.captured[n] = captured[n].layout();
  for (size_t n = 0; n < call.d_captured.size(); ++n) {
    if (call.d_captured[n].present()) options.grad_captured |= uint64_t{1} << n;
  }
  options.scale = call.problem.scale, options.has_scale = call.problem.has_scale;
  options.softcap = call.problem.softcap;
  options.dropout_p = call.problem.dropout_p;
  options.dropout_seed = call.problem.dropout_seed, options.dropout_offset = call.problem.dropout_offset;
  options.alibi = call.slopes.layout().rank;
  options.sink = call.sink.present();
  options.bias = call.bias.layout(), options.mask = call.mask.layout(), options.grad_bias = call.d_bias.present();
  return options;
}

// Copies a rank's rows out of a tensor [B, S, H, D] or [B, H, S], or back. starts: of packed sequences.
struct Shard {
  std::vector<tessera_chunk> chunks;
  std::vector<int64_t> starts;
  int32_t rank;

  void each_chunk(const Tensor& whole, const Tensor& part, int dim, bool out) const {
    for (const tessera_chunk& chunk : chunks) {
      if (chunk.rank != rank) continue;
      const int64_t first = starts[static_cast<size_t>(chunk.sequence)] + chunk.begin;
      Tensor rows = whole.slice(dim, first, chunk.length), mine = part.slice(dim, chunk.row, chunk.length);
      out ? mine.store(rows.load()) : rows.store(mine.load());
    }
  }
  Tensor of(const Tensor& whole, int dim) const {
    std::vector<int64_t> shape(whole.layout().shape, whole.layout().shape + whole.layout().rank);
    shape[static_cast<size_t>(dim)] /= ranks;
    Tensor part(whole.layout().dtype, shape);
    each_chunk(whole, part, dim, true);
    return part;
  }
  int32_t ranks;
};

// The best instruction set of vectors: AMX's tiles refuse programs, and their weights are less exact, so that a merged
// LSE may be a tenth further from float64 by chance.
const Place& best_place() {
  static const Place place = [] {
    std::vector<Place> places = cpu_places();
    std::erase_if(places, [](const Place& at) { return at.isa == TESSERA_ISA_AMX_BF16; });
    return places.back();
  }();
  return place;
}
tessera_device device_at(const Place& place) {
  tessera_device device = cpu_device();
  device.isa = place.isa, device.vector_isa = place.vector_isa;
  device.threads = 1;
  return device;
}

void on_threads(int32_t ranks, const std::function<void(int32_t)>& body) {
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < ranks; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

// Where a rank computes.
struct Site {
  tessera_device device;
  Gpu* gpu;  // NULL: on the CPU
  const Communicator* communicator;
};

// Memory at a site. A GPU's has a copy on the host.
class SiteMemory {
 public:
  SiteMemory(const Site& site, void* host, size_t bytes) : site_(site), host_(host), bytes_(bytes) {
    if (!site.gpu || bytes == 0) return;
    block_ = std::make_unique<GpuBlock>(bytes, false, *site.gpu);
    upload();
  }
  void* data() const { return block_ ? block_->data() : host_; }
  void upload() {
    if (block_) site_.gpu->upload(block_->data(), host_, bytes_, site_.gpu->stream());
  }
  void download() {
    if (block_) site_.gpu->download(host_, block_->data(), bytes_, site_.gpu->stream());
  }

 private:
  const Site& site_;
  void* host_;
  size_t bytes_;
  std::unique_ptr<GpuBlock> block_;
};

size_t bytes_of(const Tensor& tensor) {
  return static_cast<size_t>(tensor.size()) * tessera_dtype_bytes(tensor.layout().dtype);
}

// Computes o, lse and the gradients of `whole`, each rank its rows; twice, since memory that a call leaves behind must
// not matter.
void run_on_ranks(Call& whole, const Case& c, const Setting& setting, const std::vector<Site>& sites) {
  const int64_t rows = c.sq;
  const tessera_ranks_problem problem = problem_of(c, setting, rows);
  // Each rank's parts of the gradients of what all ranks have: of the sink, the bias, and captured tensors.
  std::vector<Tensor*> shared{&whole.d_sink, &whole.d_bias};
  for (Tensor& tensor : whole.d_captured) shared.push_back(&tensor);
  std::vector<std::vector<std::vector<double>>> parts(static_cast<size_t>(setting.ranks));
  on_threads(setting.ranks, [&](int32_t rank) {
    try {
      const Site& site = sites[static_cast<size_t>(rank)];
      tessera_device device = site.device;
      std::snprintf(device.family, sizeof device.family, "%s", setting.forward_by.c_str());
      const RanksAttention attention(problem, rank, options_of(whole, setting), &device);
      const RankSchedule schedule(attention.plan(), rank);
      Shard shard{{schedule.chunks().begin(), schedule.chunks().end()}, {0}, rank, setting.ranks};
      for (const int64_t length : setting.lengths) shard.starts.push_back(shard.starts.back() + length);
      const Tensor q = shard.of(whole.q, 1), k = shard.of(whole.k, 1), v = shard.of(whole.v, 1);
      const Tensor d_o = shard.of(whole.d_o, 1);
      std::vector<Tensor> outputs;
      for (const auto& [tensor, dim] :
           {std::pair{&whole.o, 1}, {&whole.lse, 2}, {&whole.d_q, 1}, {&whole.d_k, 1}, {&whole.d_v, 1}}) {
        outputs.push_back(shard.of(*tensor, dim));
      }
      const size_t first_shared = outputs.size();
      for (const Tensor* tensor : shared) {
        const tessera_layout& layout = tensor->layout();
        const std::vector<int64_t> shape(layout.shape, layout.shape + layout.rank);
        outputs.push_back(tensor->present() ? Tensor(TESSERA_FLOAT32, shape) : Tensor());
      }
      const auto memory = [&site](const Tensor& tensor) {
        return SiteMemory(site, tensor.present() ? tensor.data() : nullptr, tensor.present() ? bytes_of(tensor) : 0);
      };
      const auto poisoned = [](size_t bytes) { return std::vector<std::byte>(bytes, std::byte{0xFF}); };
      std::vector<std::byte> saved = poisoned(attention.saved_bytes() + 64);
      std::vector<std::byte> forward = poisoned(attention.workspace_bytes(TESSERA_FORWARD));
      std::vector<std::byte> backward = poisoned(attention.workspace_bytes(TESSERA_BACKWARD));
      const SiteMemory inputs[] = {
          memory(q),          memory(k),          memory(v),         memory(d_o), memory(whole.slopes),
          memory(whole.sink), memory(whole.bias), memory(whole.mask)};
      const SiteMemory saved_there(site, saved.data(), saved.size());
      const SiteMemory forward_there(site, forward.data(), forward.size());
      const SiteMemory backward_there(site, backward.data(), backward.size());
      std::deque<SiteMemory> results;
      for (const Tensor& output : outputs) results.push_back(memory(output));
      const size_t misaligned = reinterpret_cast<uintptr_t>(saved_there.data()) % 64;
      RanksBuffers buffers{};
      buffers.q = inputs[0].data(), buffers.k = inputs[1].data(), buffers.v = inputs[2].data();
      buffers.d_o = inputs[3].data(), buffers.alibi_slopes = static_cast<const float*>(inputs[4].data());
      buffers.saved = static_cast<std::byte*>(saved_there.data()) + (misaligned ? 64 - misaligned : 0);
      buffers.o = results[0].data(), buffers.lse = static_cast<float*>(results[1].data());
      buffers.d_q = results[2].data(), buffers.d_k = results[3].data(), buffers.d_v = results[4].data();
      buffers.sink = static_cast<const float*>(inputs[5].data());
      std::deque<SiteMemory> captured;
      for (const Tensor& tensor : setting.program ? setting.captured : whole.captured) {
        captured.push_back(memory(tensor));
        buffers.captured[captured.size() - 1] = captured.back().data();
      }
      std::ranges::copy(setting.program ? setting.scalars : whole.scalars, buffers.scalars);
      buffers.d_sink = static_cast<float*>(results[first_shared].data());
      buffers.bias = inputs[6].data(), buffers.mask = static_cast<const uint8_t*>(inputs[7].data());
      buffers.d_bias = static_cast<float*>(results[first_shared + 1].data());
      for (size_t n = 0; n < whole.d_captured.size(); ++n) {
        buffers.d_captured[n] = static_cast<float*>(results[first_shared + 2 + n].data());
      }
      tessera_executor executor{};
      executor.stream = site.gpu ? site.gpu->stream() : nullptr;
      const auto span_of = [](const SiteMemory& there, const std::vector<std::byte>& bytes) {
        return std::span(static_cast<std::byte*>(there.data()), bytes.size());
      };
      std::vector<std::byte> first;
      for (int times = 0; times < 2; ++times) {
        for (size_t n = 0; n < outputs.size(); ++n) {
          if (outputs[n].present()) outputs[n].poison();
          results[n].upload();
        }
        attention.forward(*site.communicator, buffers, span_of(forward_there, forward), &executor);
        if (problem.direction == TESSERA_BACKWARD) {
          attention.backward(*site.communicator, buffers, span_of(backward_there, backward), &executor);
        }
        if (site.gpu) site.gpu->synchronize(executor.stream);
        std::vector<std::byte> all;
        for (size_t n = 0; n < outputs.size(); ++n) {
          results[n].download();
          if (!outputs[n].present()) continue;
          EXPECT_TRUE(outputs[n].unharmed_outside());
          const std::vector<std::byte> bytes = outputs[n].bytes();
          all.insert(all.end(), bytes.begin(), bytes.end());
        }
        // A GPU's dQ is deterministic only on request.
        EXPECT_TRUE(times == 0 || site.gpu || all == first) << "the second call's bits are others";
        first = std::move(all);
      }
      shard.each_chunk(whole.o, outputs[0], 1, false), shard.each_chunk(whole.lse, outputs[1], 2, false);
      shard.each_chunk(whole.d_q, outputs[2], 1, false);
      shard.each_chunk(whole.d_k, outputs[3], 1, false), shard.each_chunk(whole.d_v, outputs[4], 1, false);
      for (size_t n = first_shared; n < outputs.size(); ++n) {
        parts[static_cast<size_t>(rank)].push_back(outputs[n].present() ? outputs[n].load() : std::vector<double>());
      }
    } catch (const std::exception& error) {
      // The other ranks would wait for this one for ever.
      std::fprintf(stderr, "rank %d of %s: %s\n", rank, setting.text().c_str(), error.what());
      std::abort();
    }
  });
  for (size_t n = 0; n < shared.size(); ++n) {
    if (!shared[n]->present()) continue;
    std::vector<double> sum(static_cast<size_t>(shared[n]->size()));
    for (const auto& of_rank : parts) {
      std::transform(sum.begin(), sum.end(), of_rank[n].begin(), sum.begin(), std::plus<>());
    }
    shared[n]->store(sum);
  }
}

// On threads of the CPU.
void run_on_ranks(Call& whole, const Case& c, const Setting& setting) {
  const std::vector<Communicator> communicators = thread_communicators(setting.ranks);
  std::vector<Site> sites;
  for (const Communicator& communicator : communicators) {
    sites.push_back({device_at(best_place()), nullptr, &communicator});
  }
  run_on_ranks(whole, c, setting, sites);
}

double rms_error(const std::vector<double>& value, const std::vector<double>& exact) {
  double sum = 0;
  for (size_t n = 0; n < value.size(); ++n) {
    if (std::isfinite(exact[n])) sum += (value[n] - exact[n]) * (value[n] - exact[n]);
  }
  return std::sqrt(sum / static_cast<double>(value.size()));
}

std::map<std::string, std::vector<double>> results(const Call& call) {
  std::map<std::string, std::vector<double>> all = {{"o", call.o.load()},
                                                    {"lse", call.lse.load()},
                                                    {"d_q", call.d_q.load()},
                                                    {"d_k", call.d_k.load()},
                                                    {"d_v", call.d_v.load()}};
  if (call.d_sink.present()) all["d_sink"] = call.d_sink.load();
  if (call.d_bias.present()) all["d_bias"] = call.d_bias.load();
  for (size_t n = 0; n < call.d_captured.size(); ++n) {
    if (call.d_captured[n].present()) all[call.captured_names[n]] = call.d_captured[n].load();
  }
  return all;
}

// Each rank's part against the whole in float64. Many ranks are as exact as one: their errors are at most `factor`
// times its.
// `program`: of the whole; a setting's own means the same.
using RunOnRanks = void (*)(Call& whole, const Case& c, const Setting& setting);
void expect_the_whole(const std::string& text, int32_t dtype, const std::vector<Setting>& settings,
                      RunOnRanks run_many = run_on_ranks, const Place& place = best_place(), double factor = 1.05,
                      tessera_program* program = nullptr) {
  Case c = parse_case(text, nullptr).value();
  c.dtype = dtype, c.lse = c.backward = 1, c.d_sink = c.sink > 0;
  c = legalised(c);
  const Inputs in = make_inputs(c);
  Call oracle = make_oracle_call(in), one = make_call(in);
  if (program) oracle.problem.program = one.problem.program = program;
  ASSERT_TRUE(run(oracle, TESSERA_FORWARD, {.kernel = TESSERA_KERNEL_REFERENCE}).ok());
  ASSERT_TRUE(run(oracle, TESSERA_BACKWARD, {.kernel = TESSERA_KERNEL_REFERENCE}).ok());
  ASSERT_TRUE(run(one, TESSERA_FORWARD, {.place = place}).ok());
  ASSERT_TRUE(run(one, TESSERA_BACKWARD, {.place = place}).ok());
  const auto exact = results(oracle), of_one = results(one);
  const bool shares = c.sink || c.d_captured || c.d_bias;
  const PlainResult plain = shares ? plain_attention(in, Precision::kSame) : PlainResult{};
  for (const Setting& setting : settings) {
    SCOPED_TRACE(setting.text() + ": " + to_text(c));
    Call many = make_call(in);
    run_many(many, c, setting);
    for (const auto& [name, value] : results(many)) {
      if (!setting.forward_by.empty() && name[0] == 'd') continue;
      for (size_t n = 0; n < value.size(); ++n) {
        ASSERT_FALSE(std::isnan(value[n])) << name;
        if (!std::isfinite(exact.at(name)[n])) {
          ASSERT_EQ(value[n], exact.at(name)[n]) << name;
        }
      }
      const auto captured = plain.d_captured.find(name);
      // One rank's may be exact by chance: sums of a few elements, and a bias's gradient, whose error is that of the
      // rows that see few keys.
      if (name == "d_sink" || name == "d_bias" || captured != plain.d_captured.end()) {
        const PlainTensor& tensor = name == "d_sink"   ? plain.d_sink
                                    : name == "d_bias" ? plain.d_bias
                                                       : captured->second;
        EXPECT_EQ(excess_error(value, exact.at(name), tensor, TESSERA_FLOAT32), "") << name;
        continue;
      }
      const double allowed = factor * rms_error(of_one.at(name), exact.at(name));
      EXPECT_LE(rms_error(value, exact.at(name)), allowed) << name;
    }
  }
}

// The thread sanitizer takes minutes for each case with all of them: it has one of each strategy.
#if defined(__SANITIZE_THREAD__)
constexpr bool kFew = true;
#else
constexpr bool kFew = false;
#endif

const std::vector<Setting>& settings() {
  static const std::vector<Setting> few = {
      {"ring", "zig_zag", 4}, {"all_gather", "zig_zag", 4}, {"all_to_all", "zig_zag", 2}, {"mesh", "zig_zag", 4, 2}};
  if (kFew) return few;
  static const std::vector<Setting> all = {
      {"ring", "zig_zag", 1},          {"ring", "zig_zag", 2},       {"ring", "zig_zag", 4},
      {"ring", "contiguous", 4},       {"ring", "zig_zag", 8},       {"all_gather", "zig_zag", 4},
      {"all_gather", "contiguous", 2}, {"all_to_all", "zig_zag", 2}, {"all_to_all", "zig_zag", 4},
      {"all_to_all", "contiguous", 4}, {"mesh", "zig_zag", 4, 2},    {"mesh", "contiguous", 8, 2}};
  return all;
}

class Ranks : public ::testing::TestWithParam<const char*> {};
TEST_P(Ranks, AreTheWhole) {
  for (const int32_t dtype : {TESSERA_FLOAT32, TESSERA_BFLOAT16}) expect_the_whole(GetParam(), dtype, settings());
}
constexpr const char* kCases[] = {
    "b=2 sq=256 sk=256 hq=4 hkv=2 d=32 dv=32 causal=1 seed=1",
    "b=1 sq=256 sk=256 hq=4 hkv=4 d=40 dv=24 seed=2",
    "b=1 sq=512 sk=512 hq=4 hkv=1 d=32 dv=32 causal=1 wl=90 softcap=20 seed=3",
    "b=2 sq=256 sk=256 hq=4 hkv=2 d=32 dv=32 wl=60 wr=33 scale=0.3 seed=4",
    "b=2 sq=256 sk=256 hq=4 hkv=2 d=32 dv=32 causal=1 alibi=h seed=5",
    "b=2 sq=512 sk=512 hq=4 hkv=2 d=32 dv=32 causal=1 alibi=bh dropout=0.2 seed=6",
    "b=1 sq=512 sk=512 hq=4 hkv=2 d=32 dv=32 dropout=0.3 wl=200 wr=0 seed=7",
    "b=2 sq=256 sk=256 hq=4 hkv=2 d=32 dv=24 causal=1 sink=1 seed=9",
    "b=1 sq=512 sk=512 hq=4 hkv=1 d=40 dv=40 causal=1 wl=90 softcap=20 sink=1 seed=10",
    "b=1 sq=512 sk=512 hq=4 hkv=4 d=32 dv=32 wl=60 wr=33 alibi=bh dropout=0.2 sink=2 seed=11",
};
INSTANTIATE_TEST_SUITE_P(Cpu, Ranks, ::testing::ValuesIn(kCases));

// A program's names mean in every chunk what they mean in the whole: positions, heads, sequences and lengths.
struct ProgramCase {
  const char* score;
  const char* mask;
  const char* text;
  std::vector<int32_t> dtypes = {TESSERA_FLOAT32};
};
class RanksPrograms : public ::testing::TestWithParam<ProgramCase> {};

using Program = std::unique_ptr<tessera_program, decltype(&tessera_program_release)>;
Program program_of(const char* score, const char* mask, const std::vector<tessera_program_name>& names = {}) {
  tessera_program* made = nullptr;
  const Status status = tessera_program_create(score, mask, names.data(), static_cast<int32_t>(names.size()), &made);
  EXPECT_TRUE(status.ok()) << status.message();
  return {made, tessera_program_release};
}

std::vector<Setting> settings_with(const Setting& program) {
  std::vector<Setting> all = {{"ring", "zig_zag", 1},       {"ring", "zig_zag", 2},       {"ring", "contiguous", 3},
                              {"ring", "zig_zag", 8},       {"all_gather", "zig_zag", 4}, {"all_to_all", "zig_zag", 4},
                              {"mesh", "contiguous", 8, 2}, {"mesh", "zig_zag", 4, 2}};
  for (Setting& setting : all) {
    setting.program = program.program, setting.captured = program.captured, setting.scalars = program.scalars;
  }
  return all;
}

TEST_P(RanksPrograms, MeanTheSame) {
  const ProgramCase& p = GetParam();
  const Program program = program_of(p.score, p.mask);
  Setting with;
  with.program = program.get();
  std::vector<Setting> settings = settings_with(with);
  if (const Case c = parse_case(p.text, nullptr).value(); c.dropout > 0) {  // chunks are multiples of 32 rows
    std::erase_if(settings,
                  [&c](const Setting& s) { return c.sq % (32 * s.ranks * (s.layout == "zig_zag" ? 2 : 1)) != 0; });
  }
  for (const int32_t dtype : p.dtypes) {
    expect_the_whole(p.text, dtype, settings, run_on_ranks, best_place(), 1.05, program.get());
  }
}
INSTANTIATE_TEST_SUITE_P(
    Cpu, RanksPrograms,
    ::testing::Values(
        ProgramCase{"s + 0.25 * float((i * 7 + j * 3 + h + 2 * b + h_kv) % 11)",
                    "",
                    "b=2 sq=192 sk=192 hq=4 hkv=2 d=32 dv=32 causal=1 seed=1",
                    {TESSERA_FLOAT32, TESSERA_BFLOAT16}},
        ProgramCase{"s - abs(float(i - j)) / float(len_q + len_k)", "j <= q_pos && (i / 40 == j / 40 || j % 5 == 0)",
                    "b=1 sq=384 sk=384 hq=4 hkv=4 d=40 dv=24 seed=2"},
        // Rows from 100 on see nothing.
        ProgramCase{"", "i < 100 && i - j < 30", "b=1 sq=192 sk=192 hq=4 hkv=2 d=32 dv=32 wl=50 wr=60 seed=3"},
        ProgramCase{"20 * tanh(s / 20)", "(h + i + j) % 3 != 0",
                    "b=1 sq=768 sk=768 hq=4 hkv=1 d=32 dv=32 causal=1 alibi=h dropout=0.2 wl=300 seed=4"}),
    [](const auto& info) { return std::to_string(info.index); });

// Every rank has the whole of a tensor that the program reads.
TEST(Ranks, ProgramsReadTensorsAndScalars) {
  const Program formula = program_of("s + 0.5 * float((i * 7 + j * 3) % 11) - 1.5 * float(h)", "");
  const Program reading = program_of("s + table[h, (i * 7 + j * 3) % 11] - factor * float(h)", "",
                                     {{"table", TESSERA_VALUE_FLOAT, 2}, {"factor", TESSERA_VALUE_FLOAT, -1}});
  std::vector<double> values;
  for (int n = 0; n < 44; ++n) values.push_back(0.5 * (n % 11));
  Setting with;
  with.program = reading.get(), with.scalars = {1.5};
  with.captured = {Tensor(TESSERA_FLOAT32, {4, 11})};
  with.captured[0].store(values);
  expect_the_whole("b=2 sq=192 sk=192 hq=4 hkv=2 d=32 dv=32 causal=1 seed=5", TESSERA_FLOAT32, settings_with(with),
                   run_on_ranks, best_place(), 1.05, formula.get());
}

// Programs, biases and masks. Sinks, which rows that see no key do not get; and gradients of tensors, which are sums
// over the ranks.
constexpr const char* kProgramCases[] = {
    "b=2 sq=256 sk=256 hq=4 hkv=2 d=32 dv=32 sink=1 mask_mod='i % 7 != 3 && (i + j) % 5 != h' seed=12",
    "b=1 sq=256 sk=256 hq=4 hkv=2 d=32 dv=24 causal=1 sink=2 d_captured=1 seed=13 "
    "score_mod='s * temperature[h] + relative[h, i - j + len_k]'",
    "b=2 sq=256 sk=256 hq=4 hkv=1 d=32 dv=32 wl=90 wr=0 d_captured=1 dropout=0.2 seed=14 "
    "score_mod='s + place[i] * place[j] + query_bias[b, i]' mask_mod='doc[b, i] == doc[b, j]'",
    "b=2 sq=256 sk=256 hq=4 hkv=2 d=32 dv=32 causal=1 bias=bhqk d_bias=1 sink=1 mask=hqk seed=15",
    "b=1 sq=256 sk=256 hq=4 hkv=2 d=32 dv=24 bias=hk d_bias=1 bias_f32=1 mask=bqk alibi=h seed=16",
};
class RanksProgramCases : public ::testing::TestWithParam<const char*> {};
TEST_P(RanksProgramCases, AreTheWhole) {
  std::vector<Setting> settings = settings_with({});
  const auto divides = [](const Setting& s) { return 256 % (32 * s.ranks * (s.layout == "zig_zag" ? 2 : 1)) == 0; };
  std::erase_if(settings, [&](const Setting& setting) { return !divides(setting); });
  for (const int32_t dtype : {TESSERA_FLOAT32, TESSERA_BFLOAT16}) expect_the_whole(GetParam(), dtype, settings);
}
INSTANTIATE_TEST_SUITE_P(Cpu, RanksProgramCases, ::testing::ValuesIn(kProgramCases));

TEST(Ranks, Float16) {
  expect_the_whole(kCases[0], TESSERA_FLOAT16, {{"ring", "zig_zag", 4}, {"all_to_all", "zig_zag", 4}});
}

// Packed sequences, each an attention of its own: long ones are cut, short ones are not.
void expect_packed_whole(const std::string& text, int32_t dtype, const std::vector<Setting>& settings,
                         RunOnRanks run_many = run_on_ranks, const Place& place = best_place(), double factor = 1.05) {
  Case c = parse_case(text, nullptr).value();
  c.dtype = dtype, c.lse = c.backward = 1, c.d_sink = c.sink > 0;
  c = legalised(c);
  const Inputs in = make_inputs(c);
  for (const Setting& setting : settings) {
    SCOPED_TRACE(setting.text() + ": " + to_text(c));
    Call many = make_call(in), one = make_call(in), oracle = make_oracle_call(in);
    run_many(many, c, setting);
    std::map<std::string, std::map<std::string, std::vector<double>>> of_all;  // results by tensor
    int64_t begin = 0;
    for (const int64_t length : setting.lengths) {
      if (length == 0) continue;
      const auto rows_of = [&](const Call& whole) {
        Call part = whole;
        for (Tensor* const t : {&part.q, &part.k, &part.v, &part.o, &part.d_o, &part.d_q, &part.d_k, &part.d_v}) {
          *t = t->slice(1, begin, length);
        }
        part.lse = part.lse.slice(2, begin, length);
        part.describe();
        return part;
      };
      Call exact = rows_of(oracle), of_one = rows_of(one);
      for (const tessera_direction direction : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
        ASSERT_TRUE(run(exact, direction, {.kernel = TESSERA_KERNEL_REFERENCE}).ok());
        ASSERT_TRUE(run(of_one, direction, {.place = place}).ok());
      }
      for (const auto& [name, values] :
           {std::pair{"many", results(rows_of(many))}, {"exact", results(exact)}, {"one", results(of_one)}}) {
        for (const auto& [tensor, value] : values) {
          std::vector<double>& all = of_all[name][tensor];
          all.insert(all.end(), value.begin(), value.end());
        }
      }
      begin += length;
    }
    for (const auto& [tensor, exact] : of_all["exact"]) {
      if (tensor == "d_sink") continue;  // the same as of one sequence
      EXPECT_LE(rms_error(of_all["many"][tensor], exact), factor * rms_error(of_all["one"][tensor], exact)) << tensor;
    }
  }
}

TEST(Ranks, PackedSequencesAreTheWhole) {
  const std::vector<int64_t> lengths = {160, 7, 41, 16, 0, 288};
  for (const char* options : {"causal=1", "wl=50 wr=0 alibi=h", "wl=50 wr=0", "", "causal=1 sink=1"}) {
    if (kFew && std::string_view(options) != "wl=50 wr=0 alibi=h") continue;
    expect_packed_whole(std::string("b=1 sq=512 sk=512 hq=4 hkv=2 d=32 dv=32 seed=8 ") + options, TESSERA_FLOAT32,
                        {{"ring", "planned", 4, 0, lengths},
                         {"all_gather", "planned", 2, 0, lengths},
                         {"all_to_all", "zig_zag", 4, 0, lengths},
                         {"mesh", "planned", 4, 2, lengths}});
  }
}

// ---- errors ---------------------------------------------------------------------------------------------------------

// A small problem with its data.
struct Small {
  int64_t rows = 256;
  tessera_ranks_problem problem;
  std::vector<float> q, k, o, lse;
  std::vector<std::byte> workspace;

  explicit Small(int32_t ranks) {
    tessera_ranks_problem_init(&problem);
    problem.ranks = ranks, problem.dtype = TESSERA_FLOAT32, problem.causal = 1;
    problem.lengths = &rows, problem.num_sequences = 1;
    problem.heads_q = 2, problem.heads_kv = 1, problem.head_dim = 16;
  }
  Small(const Small&) = delete;

  RanksBuffers data() {
    q.assign(static_cast<size_t>(rows) * 32, 0.5f), k.assign(static_cast<size_t>(rows) * 16, 0.25f);
    o.assign(q.size(), 0), lse.assign(static_cast<size_t>(rows) * 2, 0);
    RanksBuffers buffers{};
    buffers.q = q.data(), buffers.k = buffers.v = k.data(), buffers.o = o.data(), buffers.lse = lse.data();
    return buffers;
  }
  std::string forward(const RanksAttention& attention, const Communicator& communicator,
                      const tessera_executor* executor = nullptr) {
    const RanksBuffers buffers = data();
    workspace.resize(attention.workspace_bytes());
    return std::string(attention.try_forward(communicator, buffers, workspace, executor).message());
  }
};

std::string refusal(const tessera_ranks_problem& problem, const RanksOptions& options = {}, int32_t rank = 0) {
  try {
    const RanksAttention attention(problem, rank, options);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(RanksErrors, NameWhatIsWrong) {
  Small small(4);
  EXPECT_EQ(refusal(small.problem), "");
  EXPECT_EQ(refusal(small.problem, {}, 4), "rank: 4, accepted 0 .. 3");
  small.problem.strategy = TESSERA_STRATEGY_ALL_TO_ALL;
  EXPECT_NE(refusal(small.problem).find("all_to_all"), std::string::npos) << refusal(small.problem);
  small.problem.strategy = TESSERA_STRATEGY_RING;
  small.rows = 257;
  EXPECT_NE(refusal(small.problem).find("257"), std::string::npos) << refusal(small.problem);
  small.rows = 128;
  RanksOptions options{};
  options.dropout_p = 0.5;
  EXPECT_NE(refusal(small.problem, options).find("multiples of 32 rows"), std::string::npos);
  options = {};
  options.alibi = 3;
  EXPECT_EQ(refusal(small.problem, options), "alibi: 3, accepted 0 .. 2");
  options = {};
  const Program program = program_of("s + table[i]", "", {{"table", TESSERA_VALUE_FLOAT, 1}});
  options.program = program.get();
  EXPECT_EQ(refusal(small.problem, options).find("captured[0] (table): "), 0u) << refusal(small.problem, options);
  options.captured[0] = {TESSERA_FLOAT32, 1, {256}, {1}}, options.grad_captured = 5;
  EXPECT_EQ(refusal(small.problem, options),
            "grad_captured: bit 2 is set, accepted bits of captured tensors that are given");
  options = {};
  options.captured[0] = {TESSERA_FLOAT32, 1, {256}, {1}};
  EXPECT_EQ(refusal(small.problem, options), "captured[0]: given without program, whose tensor it is");
  options = {};
  options.bias = {TESSERA_FLOAT32, 4, {1, 2, 128, 64}, {16384, 8192, 64, 1}};
  EXPECT_EQ(refusal(small.problem, options),
            "bias: rank 4, shape [1, 2, 128, 64], accepted rank 4, [1|1, 2|1, 128|1, 128]");
  options = {};
  options.grad_bias = 1;
  EXPECT_EQ(refusal(small.problem, options), "grad_bias: 1 without bias, accepted only with it");
  options = {};
  options.sink = 2;
  EXPECT_EQ(refusal(small.problem, options), "sink: 2, accepted 0 or 1");
  options.struct_size = 0;
  EXPECT_NE(refusal(small.problem, options).find("options: struct_size 0"), std::string::npos);
  EXPECT_THROW((void)thread_communicators(0), Error);
}

TEST(RanksErrors, OfCalls) {
  Small small(1);
  const RanksAttention attention(small.problem, 0);
  const std::vector<Communicator> alone = thread_communicators(1), two = thread_communicators(2);
  EXPECT_EQ(small.forward(attention, alone[0]), "");
  EXPECT_EQ(small.forward(attention, two[1]), "communicator: rank 1 of 2, accepted that of the attention, rank 0 of 1");
  RanksBuffers buffers = small.data();
  EXPECT_EQ(attention.try_backward(alone[0], buffers, small.workspace).message(),
            "attention: prepared for the forward pass, accepted one of direction backward");
  EXPECT_THROW((void)attention.plan(TESSERA_BACKWARD), Error);
  EXPECT_EQ(attention.saved_bytes(), 0u);
  buffers.k = nullptr;
  EXPECT_EQ(attention.try_forward(alone[0], buffers, small.workspace).message(),
            "k: NULL, but the problem describes it with shape [1, 256, 1, 16]");
  buffers = small.data();
  EXPECT_EQ(RanksAttention(small.problem, 0, {.sink = 1}).try_forward(alone[0], buffers, small.workspace).message(),
            "sink: NULL, but the problem describes it with shape [2]");
  const std::string few(attention.try_forward(alone[0], buffers, {}).message());
  EXPECT_EQ(few.substr(0, few.find(',')), "workspace_bytes: 0");
}

// Each captured tensor of a program, and each gradient, by its number.
TEST(RanksErrors, NameEachCapturedTensor) {
  std::string score = "s";
  std::vector<tessera_program_name> names;
  std::vector<std::string> letters;
  for (int n = 0; n < TESSERA_MAX_CAPTURED_TENSORS; ++n) letters.emplace_back(1, static_cast<char>('a' + n));
  for (const std::string& letter : letters) {
    score += " + t" + letter + "[h]";
  }
  for (std::string& letter : letters) {
    letter.insert(0, "t");
    names.push_back({letter.c_str(), TESSERA_VALUE_FLOAT, 1});
  }
  const Program program = program_of(score.c_str(), "", names);
  RanksOptions options{};
  options.program = program.get(), options.grad_captured = (1u << TESSERA_MAX_CAPTURED_TENSORS) - 1;
  for (tessera_layout& captured : options.captured) captured = {TESSERA_FLOAT32, 1, {2}, {1}};
  Small small(1);
  small.problem.direction = TESSERA_BACKWARD;
  const RanksAttention attention(small.problem, 0, options);
  const std::vector<Communicator> alone = thread_communicators(1);
  std::vector<float> d_q(8192), d_k(4096), d_v(4096), captured(2);
  std::vector<std::vector<float>> d_captured(TESSERA_MAX_CAPTURED_TENSORS, std::vector<float>(2));
  std::vector<std::byte> saved(attention.saved_bytes());
  small.workspace.resize(std::max(attention.workspace_bytes(), attention.workspace_bytes(TESSERA_BACKWARD)));
  for (int n = 0; n < TESSERA_MAX_CAPTURED_TENSORS; ++n) {
    RanksBuffers buffers = small.data();
    buffers.saved = saved.data(), buffers.d_o = small.q.data();
    buffers.d_q = d_q.data(), buffers.d_k = d_k.data(), buffers.d_v = d_v.data();
    for (int other = 0; other < TESSERA_MAX_CAPTURED_TENSORS; ++other) {
      buffers.captured[other] = captured.data(),
      buffers.d_captured[other] = d_captured[static_cast<size_t>(other)].data();
    }
    const std::string slot = "captured[" + std::to_string(n) + "]", null = ": NULL, but the problem describes it with";
    buffers.d_captured[n] = nullptr;
    const std::string gradient(attention.try_backward(alone[0], buffers, small.workspace).message());
    EXPECT_EQ(gradient.find("d_" + slot + null), 0u) << gradient;
    buffers.captured[n] = nullptr;
    const std::string primal(attention.try_forward(alone[0], buffers, small.workspace).message());
    EXPECT_EQ(primal.find(slot + null), 0u) << primal;
  }
}

TEST(RanksErrors, RanksThatDisagreeAllLearnIt) {
  const std::vector<Communicator> communicators = thread_communicators(3);
  std::string messages[3];
  on_threads(3, [&](int32_t rank) {
    Small small(3);
    small.rows = 96;
    small.problem.layout = TESSERA_RANKS_CONTIGUOUS, small.problem.causal = rank != 1;
    const RanksAttention attention(small.problem, rank);
    messages[rank] = small.forward(attention, communicators[static_cast<size_t>(rank)]);
    // The communicator goes on to serve problems that all have.
    Small same(3);
    same.rows = 96, same.problem.layout = TESSERA_RANKS_CONTIGUOUS;
    EXPECT_EQ(same.forward(RanksAttention(same.problem, rank), communicators[static_cast<size_t>(rank)]), "");
  });
  EXPECT_EQ(messages[0].find("attention: rank 0 has another problem than rank 1, accepted the same"), 0u)
      << messages[0];
  EXPECT_EQ(messages[1].find("attention: rank 1 has another problem than ranks 0, 2, accepted"), 0u) << messages[1];
}

// A rank whose call ends early while another waits for it: that one's error says which step was waiting.
TEST(RanksErrors, OfOneRankEndTheOthers) {
  const std::vector<Communicator> communicators = thread_communicators(2);
  // Asked more often than a call of this size has work to do, rank 0 waits.
  constexpr int kWaits = 200;
  std::atomic<int> asked = 0;
  std::string messages[2];
  on_threads(2, [&](int32_t rank) {
    Small small(2);
    small.problem.strategy = TESSERA_STRATEGY_RING;
    const RanksAttention attention(small.problem, rank);
    EXPECT_EQ(small.forward(attention, communicators[static_cast<size_t>(rank)]), "");
    tessera_executor executor{};
    executor.cancel_context = &asked;
    executor.cancel = [](void* count) -> int32_t {
      ++*static_cast<std::atomic<int>*>(count);
      return 0;
    };
    if (rank == 1) {
      executor.cancel = [](void* count) -> int32_t {
        while (*static_cast<std::atomic<int>*>(count) < kWaits) std::this_thread::yield();
        return 1;
      };
    }
    messages[rank] = small.forward(attention, communicators[static_cast<size_t>(rank)], &executor);
  });
  EXPECT_NE(messages[0].find("step 1 of 2: rank 1 ended its call"), std::string::npos) << messages[0];
  EXPECT_NE(messages[1].find("cancel"), std::string::npos) << messages[1];
}

// What a rank has sent is not read once its call has ended: it may be freed at once (sanitizers see a read of it).
TEST(RanksErrors, AnEndedCallFreesItsMemory) {
  for (const int32_t cancelled : {0, 1, 2}) {
    const std::vector<Communicator> communicators = thread_communicators(3);
    std::string messages[3];
    on_threads(3, [&](int32_t rank) {
      Small small(3);
      small.rows = 6144, small.problem.strategy = TESSERA_STRATEGY_RING;
      const RanksAttention attention(small.problem, rank);
      tessera_executor executor{};
      if (rank == cancelled) executor.cancel = [](void*) -> int32_t { return 1; };
      messages[rank] = small.forward(attention, communicators[static_cast<size_t>(rank)], &executor);
    });
    const std::string ended = "rank " + std::to_string(cancelled) + " ended its call";
    for (int32_t rank = 0; rank < 3; ++rank) {
      EXPECT_NE(messages[rank].find(rank == cancelled ? "cancel" : ended), std::string::npos) << messages[rank];
    }
  }
}

// Calls of `ranks` threads, each with a communicator of its own. body(rank, communicator) returns the call's message.
using RankBody = std::function<std::string(int32_t rank, const Communicator& communicator)>;
std::vector<std::string> messages_of(std::vector<Communicator>& communicators, const RankBody& body) {
  std::vector<std::string> messages(communicators.size());
  on_threads(static_cast<int32_t>(messages.size()), [&](int32_t rank) {
    const auto n = static_cast<size_t>(rank);
    messages[n] = body(rank, communicators[n]);
  });
  return messages;
}

// The first to ask is `at` askings away.
struct CancelledAt {
  std::atomic<int> left;
  explicit CancelledAt(int at) : left(at) {}
  tessera_executor executor() {
    tessera_executor executor{};
    executor.cancel_context = this;
    executor.cancel = [](void* self) -> int32_t { return --static_cast<CancelledAt*>(self)->left < 0 ? 1 : 0; };
    return executor;
  }
};

// A call that is refused before it sends anything. It ends the communicators of all ranks: later calls fail at once.
TEST(RanksErrors, ARefusedCallEndsTheOthers) {
  Small other(2);
  const RanksAttention first(other.problem, 0);
  const struct {
    std::string message;
    std::function<Status(const RanksAttention&, const Communicator&, RanksBuffers, std::vector<std::byte>&)> call;
  } all[] = {{"k: NULL",
              [](auto& attention, auto& communicator, RanksBuffers data, auto& workspace) {
                data.k = nullptr;
                return attention.try_forward(communicator, data, workspace);
              }},
             {"k: 0x",
              [](auto& attention, auto& communicator, RanksBuffers data, auto& workspace) {
                data.k = static_cast<const char*>(data.k) + 1;
                return attention.try_forward(communicator, data, workspace);
              }},
             {"o: shares memory with q",
              [](auto& attention, auto& communicator, RanksBuffers data, auto& workspace) {
                data.o = const_cast<void*>(data.q);
                return attention.try_forward(communicator, data, workspace);
              }},
             {"workspace_bytes: ",
              [](auto& attention, auto& communicator, RanksBuffers data, auto& workspace) {
                return attention.try_forward(communicator, data, std::span(workspace).subspan(1));
              }},
             {"workspace: NULL",
              [](auto& attention, auto& communicator, RanksBuffers data, auto& workspace) {
                return attention.try_forward(communicator, data, {static_cast<std::byte*>(nullptr), workspace.size()});
              }},
             {"buffers: struct_size 0",
              [](auto& attention, auto& communicator, RanksBuffers data, auto& workspace) {
                data.struct_size = 0;
                return attention.try_forward(communicator, data, workspace);
              }},
             {"attention: prepared for the forward pass",
              [](auto& attention, auto& communicator, RanksBuffers data, auto& workspace) {
                return attention.try_backward(communicator, data, workspace);
              }},
             {"communicator: rank 1 of 2, accepted that of the attention, rank 0 of 2",
              [&first](auto&, auto& communicator, RanksBuffers data, auto& workspace) {
                return first.try_forward(communicator, data, workspace);
              }},
             {"buffers: NULL",
              [](auto&, auto& communicator, RanksBuffers, auto&) {
                Small small(2);
                tessera_ranks_attention* attention = nullptr;
                throw_if_error(tessera_ranks_attention_create(&small.problem, nullptr, nullptr, 1, &attention));
                const Status status =
                    tessera_ranks_forward(attention, communicator.get(), nullptr, nullptr, 0, nullptr);
                tessera_ranks_attention_destroy(attention);
                return status;
              }},
             {"attention: NULL", [](auto&, auto& communicator, RanksBuffers data, auto&) -> Status {
                return tessera_ranks_forward(nullptr, communicator.get(), &data, nullptr, 0, nullptr);
              }}};
  for (const auto& [message, call] : all) {
    for (const bool first_call : {true, false}) {  // of the problem, which waits for all
      SCOPED_TRACE(message);
      std::vector<Communicator> communicators = thread_communicators(2);
      std::string again[2];
      const std::vector<std::string> messages = messages_of(communicators, [&](int32_t rank, const auto& communicator) {
        Small small(2);
        small.problem.strategy = TESSERA_STRATEGY_RING;
        const RanksAttention attention(small.problem, rank);
        if (!first_call) {
          EXPECT_EQ(small.forward(attention, communicator), "");
        }
        const RanksBuffers data = small.data();
        small.workspace.resize(attention.workspace_bytes());
        std::string ended(rank == 1 ? call(attention, communicator, data, small.workspace).message()
                                    : attention.try_forward(communicator, data, small.workspace).message());
        again[rank] = small.forward(attention, communicator);
        return ended;
      });
      EXPECT_EQ(messages[1].find(message), 0u) << messages[1];
      EXPECT_NE(messages[0].find("rank 1 ended its call: " + messages[1]), std::string::npos) << messages[0];
      for (const std::string& later : again) {
        EXPECT_EQ(later.find("communicator: serves no more calls, make new ones for all ranks: rank 1 ended"), 0u)
            << later;
      }
    }
  }
}

// Ranks that make different calls, at a problem's first call and later: all of them get an error, and none waits.
TEST(RanksErrors, DifferentCallsEndAll) {
  const auto small_of = [](int32_t heads) {
    auto small = std::make_unique<Small>(2);
    small->problem.strategy = TESSERA_STRATEGY_RING, small->problem.direction = TESSERA_BACKWARD;
    small->problem.heads_q = 2 * heads;
    return small;
  };
  const auto call = [](Small& small, const RanksAttention& attention, const Communicator& communicator,
                       tessera_direction direction) {
    RanksBuffers data = small.data();
    std::vector<std::byte> saved(attention.saved_bytes() + 64);
    std::vector<float> d_o(small.q.size()), d_q(small.q.size()), d_k(small.k.size()), d_v(small.k.size());
    data.saved = saved.data() + (64 - reinterpret_cast<uintptr_t>(saved.data()) % 64) % 64;
    data.d_o = d_o.data(), data.d_q = d_q.data(), data.d_k = d_k.data(), data.d_v = d_v.data();
    small.workspace.resize(attention.workspace_bytes(direction));
    return std::string(direction == TESSERA_FORWARD
                           ? attention.try_forward(communicator, data, small.workspace).message()
                           : attention.try_backward(communicator, data, small.workspace).message());
  };
  for (const bool known : {false, true}) {
    for (const bool other_direction : {false, true}) {
      SCOPED_TRACE(std::to_string(known) + std::to_string(other_direction));
      std::vector<Communicator> communicators = thread_communicators(2);
      const std::vector<std::string> messages = messages_of(communicators, [&](int32_t rank, const auto& communicator) {
        const auto a = small_of(1), b = small_of(other_direction ? 1 : 2);
        const RanksAttention of_a(a->problem, rank), of_b(b->problem, rank);
        const tessera_direction second = other_direction ? TESSERA_BACKWARD : TESSERA_FORWARD;
        for (int n = 0; n < 2 && known; ++n) {
          EXPECT_EQ(call(*a, of_a, communicator, TESSERA_FORWARD), "");
          EXPECT_EQ(call(*b, of_b, communicator, second), "");
        }
        return rank == 0 ? call(*a, of_a, communicator, TESSERA_FORWARD) : call(*b, of_b, communicator, second);
      });
      if (!known) {
        EXPECT_EQ(messages[0].find("attention: rank 0 has another problem than rank 1"), 0u) << messages[0];
        EXPECT_EQ(messages[1].find("attention: rank 1 has another problem than rank 0"), 0u) << messages[1];
        continue;
      }
      // The first to see it says so, and the other learns it from that one, or sees it, too.
      const std::string words = "makes another one than rank";
      EXPECT_NE(messages[0].find(words), std::string::npos) << messages[0];
      EXPECT_NE(messages[1].find(words), std::string::npos) << messages[1];
    }
  }
}

// One rank calls a problem that it has called before, another one a new one.
TEST(RanksErrors, AFirstCallMeetsALaterOne) {
  std::vector<Communicator> communicators = thread_communicators(3);
  const std::vector<std::string> messages = messages_of(communicators, [](int32_t rank, const auto& communicator) {
    Small small(3), other(3);
    small.rows = 96, small.problem.layout = TESSERA_RANKS_CONTIGUOUS, small.problem.strategy = TESSERA_STRATEGY_RING;
    other.rows = 192, other.problem.layout = TESSERA_RANKS_CONTIGUOUS;
    const RanksAttention attention(small.problem, rank), another(other.problem, rank);
    EXPECT_EQ(small.forward(attention, communicator), "");
    return rank == 2 ? other.forward(another, communicator) : small.forward(attention, communicator);
  });
  for (const std::string& message : messages) EXPECT_NE(message, "");
}

TEST(RanksErrors, OneCallAtATime) {
  std::vector<Communicator> communicators = thread_communicators(2);
  Small small(2), second(2);
  small.problem.strategy = second.problem.strategy = TESSERA_STRATEGY_RING;
  const RanksAttention attention(small.problem, 0);
  std::atomic<bool> inside = false;
  tessera_executor executor{};
  executor.cancel_context = &inside;
  executor.cancel = [](void* flag) -> int32_t {
    static_cast<std::atomic<bool>*>(flag)->store(true);
    return 0;
  };
  std::string message;
  std::thread other([&] { message = small.forward(attention, communicators[0], &executor); });
  while (!inside) std::this_thread::yield();  // it waits for rank 1
  const std::string refused = second.forward(attention, communicators[0]);
  other.join();
  EXPECT_EQ(refused, "communicator: another call uses it, accepted one call at a time");
  EXPECT_NE(message.find("rank 0 ended its call: " + refused), std::string::npos) << message;
}

TEST(RanksErrors, DestroyedCommunicatorsEndTheOthers) {
  for (const bool first_call : {true, false}) {
    std::vector<Communicator> communicators = thread_communicators(3);
    const std::vector<std::string> messages = messages_of(communicators, [&](int32_t rank, const auto& communicator) {
      Small small(3);
      small.rows = 96, small.problem.strategy = TESSERA_STRATEGY_RING;
      const RanksAttention attention(small.problem, rank);
      if (!first_call) {
        EXPECT_EQ(small.forward(attention, communicator), "");
      }
      if (rank != 1) return small.forward(attention, communicator);
      const Communicator destroyed = std::move(communicators[1]);
      return std::string();
    });
    for (const int32_t rank : {0, 2}) {
      EXPECT_NE(messages[static_cast<size_t>(rank)].find("the communicator of rank 1 was destroyed"), std::string::npos)
          << messages[static_cast<size_t>(rank)];
    }
  }
}

// A rank may end as soon as its own calls are complete, while others still wait for each other.
TEST(RanksErrors, CommunicatorsMayGoOnceTheirCallsAreComplete) {
  for (int times = 0; times < 20; ++times) {
    std::vector<Communicator> communicators = thread_communicators(4);
    const std::vector<std::string> messages = messages_of(communicators, [&](int32_t rank, const auto& communicator) {
      Small small(4);
      small.problem.strategy = TESSERA_STRATEGY_RING;
      const RanksAttention attention(small.problem, rank);
      std::string message = small.forward(attention, communicator);
      const Communicator destroyed = std::move(communicators[static_cast<size_t>(rank)]);
      return message;
    });
    for (const std::string& message : messages) EXPECT_EQ(message, "");
  }
}

// Whenever `cancel` first says so: the call of that rank ends, and no other waits.
TEST(RanksErrors, CancelEndsEveryStep) {
  bool cancelled = true;
  int at = 0;
  for (; cancelled; at += 1 + at / 8) {
    std::vector<Communicator> communicators = thread_communicators(3);
    const std::vector<std::string> messages = messages_of(communicators, [&](int32_t rank, const auto& communicator) {
      Small small(3);
      small.rows = 96, small.problem.strategy = TESSERA_STRATEGY_RING;
      const RanksAttention attention(small.problem, rank);
      CancelledAt limit(at);
      const tessera_executor executor = limit.executor();
      return small.forward(attention, communicator, rank == 1 ? &executor : nullptr);
    });
    cancelled = !messages[1].empty();
    EXPECT_EQ(cancelled, messages[1].find("cancel") != std::string::npos) << messages[1];
    for (const int32_t rank : {0, 2}) {
      const std::string& message = messages[static_cast<size_t>(rank)];  // complete, if nothing of rank 1 was missing
      const bool learned = message.find("rank 1 ended its call") != std::string::npos;
      EXPECT_TRUE(message.empty() || (cancelled && learned)) << message;
    }
  }
  EXPECT_GE(at, 5);
}

// While it waits for a rank that does not come.
TEST(RanksErrors, CancelEndsWaiting) {
  std::vector<Communicator> communicators = thread_communicators(2);
  Small small(2);
  const RanksAttention attention(small.problem, 0);
  CancelledAt limit(20);
  const tessera_executor executor = limit.executor();
  const std::string message = small.forward(attention, communicators[0], &executor);
  EXPECT_NE(message.find("cancel"), std::string::npos) << message;
}

// Whichever allocation of a rank's call fails: the others do not wait for it.
TEST(RanksErrors, ExceptionsEndTheOthers) {
  std::string failed = "so far";
  int64_t allocations = 0;
  for (; !failed.empty() && allocations < 10000; ++allocations) {
    std::vector<Communicator> communicators = thread_communicators(2);
    const std::vector<std::string> messages = messages_of(communicators, [&](int32_t rank, const auto& communicator) {
      Small small(2);
      small.problem.strategy = TESSERA_STRATEGY_RING;
      tessera_device device = device_at(best_place());
      const RanksAttention attention(small.problem, rank, {}, &device);
      const RanksBuffers data = small.data();
      small.workspace.resize(attention.workspace_bytes());
      if (rank == 1) set_allocations_left(allocations);
      const Status status = attention.try_forward(communicator, data, small.workspace);
      set_allocations_left(-1);
      return std::string(status.message());
    });
    failed = messages[1];
    if (failed.empty()) {
      EXPECT_EQ(messages[0], "");
    } else if (!messages[0].empty()) {
      EXPECT_NE(messages[0].find("rank 1 ended its call"), std::string::npos) << messages[0];
    }
  }
  EXPECT_EQ(failed, "");
  EXPECT_GE(allocations, 5);
}

// ---- NCCL -----------------------------------------------------------------------------------------------------------

// The first GPUs, one for each rank, with communicators of NCCL: that of TESSERA_NCCL, or this machine's.
class NcclRanks {
 public:
  // NULL, and the reason, without enough GPUs of one kind or without NCCL.
  static std::unique_ptr<NcclRanks> of(int32_t ranks, std::string& missing) {
    if (missing = gpu_missing(); !missing.empty()) return nullptr;
    auto made = std::unique_ptr<NcclRanks>(new NcclRanks);
    for (int32_t rank = 0; rank < ranks; ++rank) {
      tessera_device device;
      const tessera_status status = tessera_device_cuda(gpu_device().ordinal + rank, &device);
      if (missing = status.message; status.code != TESSERA_OK) return nullptr;
      made->devices_.push_back(device.ordinal);
      made->sites.push_back({device, &Gpu::at(rank), nullptr});
    }
    const char* const given = std::getenv("TESSERA_NCCL");
    void* const library = dlopen(given && *given ? given : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (missing = library ? "" : dlerror(); !library) return nullptr;
    using InitAll = int (*)(ncclComm**, int, const int*);
    std::vector<ncclComm*> comms(static_cast<size_t>(ranks));
    if (reinterpret_cast<InitAll>(dlsym(library, "ncclCommInitAll"))(comms.data(), ranks, made->devices_.data()) != 0) {
      missing = "ncclCommInitAll fails";
      return nullptr;
    }
    made->communicators_.reserve(comms.size());
    for (size_t rank = 0; rank < comms.size(); ++rank) {
      made->communicators_.push_back(nccl_communicator(comms[rank]));
      made->sites[rank].communicator = &made->communicators_[rank];
    }
    return made;  // the process keeps NCCL's communicators
  }

  std::vector<Site> sites;

 private:
  NcclRanks() = default;
  std::vector<int> devices_;
  std::vector<Communicator> communicators_;
};

void run_on_gpus(Call& whole, const Case& c, const Setting& setting) {
  std::string missing;
  const auto ranks = NcclRanks::of(setting.ranks, missing);
  ASSERT_TRUE(ranks) << missing;
  run_on_ranks(whole, c, setting, ranks->sites);
}

class NcclGpuRanks : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    std::string missing;
    if (!NcclRanks::of(2, missing)) GTEST_SKIP() << "skipped: " << missing;
  }
};
// Packed sequences of several lengths, in which most calls are packed, too.
TEST(NcclGpuRanksPacked, AreTheWhole) {
  std::string missing;
  if (!NcclRanks::of(2, missing)) GTEST_SKIP() << "skipped: " << missing;
  const std::vector<int64_t> lengths = {96, 7, 41, 16, 0, 160};
  std::vector<Setting> settings = {{"ring", "planned", 2, 0, lengths}, {"all_gather", "planned", 2, 0, lengths}};
  if (NcclRanks::of(4, missing)) settings.push_back({"mesh", "planned", 4, 2, lengths});
  for (const char* options : {"causal=1", "wl=50 wr=0 alibi=h", "causal=1 sink=1"}) {
    expect_packed_whole(std::string("b=1 sq=320 sk=320 hq=4 hkv=2 d=64 dv=64 seed=8 ") + options, TESSERA_BFLOAT16,
                        settings, run_on_gpus, kGpu, 1.4);
  }
}

// A GPU's calls round their results before these are merged.
TEST_P(NcclGpuRanks, AreTheWhole) {
  std::string missing;
  std::vector<Setting> settings = {{"ring", "zig_zag", 2}, {"all_to_all", "zig_zag", 2}, {"all_gather", "zig_zag", 2}};
  if (NcclRanks::of(4, missing))
    settings.push_back({"mesh", "contiguous", 4, 2}), settings.push_back({"ring", "zig_zag", 4});
  expect_the_whole(GetParam(), TESSERA_BFLOAT16, settings, run_on_gpus, kGpu, 1.4);
}
INSTANTIATE_TEST_SUITE_P(Cuda, NcclGpuRanks,
                         ::testing::Values("b=2 sq=256 sk=256 hq=4 hkv=2 d=64 dv=64 causal=1 seed=1",
                                           "b=1 sq=256 sk=256 hq=4 hkv=2 d=64 dv=64 causal=1 alibi=h seed=2",
                                           "b=2 sq=256 sk=256 hq=4 hkv=2 d=64 dv=64 causal=1 sink=1 seed=3",
                                           "b=2 sq=256 sk=256 hq=4 hkv=2 d=64 dv=64 sink=1 d_captured=1 seed=4 "
                                           "score_mod='s * temperature[h] + relative[h, i - j + len_k]' "
                                           "mask_mod='i % 7 != 3 && (i + j) % 5 != h'",
                                           "b=2 sq=256 sk=256 hq=4 hkv=2 d=64 dv=64 causal=1 sink=1 bias=hqk d_bias=1 "
                                           "mask=bqk seed=5"));

// By a kernel that does not accumulate: calls' results are merged at the end or, if they are many, on the way.
TEST(NcclGpuRanksMerged, AreTheWhole) {
  std::string missing;
  if (!NcclRanks::of(2, missing)) GTEST_SKIP() << "skipped: " << missing;
  const char* const family = "fwd_fa1";
  // It has no sinks: what is merged has them all the same.
  expect_the_whole("b=2 sq=256 sk=256 hq=2 hkv=1 d=32 dv=32 causal=1 sink=1 seed=1", TESSERA_BFLOAT16,
                   {{"ring", "zig_zag", 2, 0, {}, family}}, run_on_gpus, kGpu, 1.4);
  expect_the_whole("b=2 sq=256 sk=256 hq=2 hkv=1 d=32 dv=32 causal=1 seed=1", TESSERA_BFLOAT16,
                   {{"all_gather", "zig_zag", 2, 0, {}, family}}, run_on_gpus, kGpu, 1.4);
  if (gpu_device().arch == 90) {  // a sink that comes after a program's masks
    expect_the_whole("b=1 sq=128 sk=128 hq=2 hkv=1 d=64 dv=64 sink=1 mask_mod='i % 7 != 3 && (i + j) % 5 != h' seed=3",
                     TESSERA_BFLOAT16, {{"ring", "zig_zag", 2, 0, {}, "decode_sm90"}}, run_on_gpus, kGpu, 1.4);
  }
  if (!NcclRanks::of(8, missing)) return;
  expect_the_whole("b=1 sq=512 sk=512 hq=2 hkv=1 d=32 dv=32 wl=300 wr=300 sink=1 seed=2", TESSERA_BFLOAT16,
                   {{"ring", "zig_zag", 8, 0, {}, family}}, run_on_gpus, kGpu, 1.4);
}

std::string nccl_refusal() {
  int none = 0;  // no communicator: NCCL is opened first
  tessera_communicator* communicator = nullptr;
  return tessera_communicator_nccl(reinterpret_cast<ncclComm*>(&none), &communicator).message;
}
// Each in a process of its own, with the environment that its name says.
TEST(NcclMissing, SaysWhatToInstall) {
  if (dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL)) GTEST_SKIP() << "skipped: this machine has NCCL";
  EXPECT_NE(nccl_refusal().find("pip install nvidia-nccl-cu13, or apt install libnccl2; or set TESSERA_NCCL"),
            std::string::npos)
      << nccl_refusal();
}
TEST(NcclTooOld, SaysWhichVersionsAreAccepted) {
  EXPECT_NE(nccl_refusal().find("is version 2.6.4, accepted 2.7 and newer"), std::string::npos) << nccl_refusal();
}
TEST(NcclElsewhere, NamesTheFile) {
  EXPECT_NE(nccl_refusal().find("TESSERA_NCCL: /nowhere/libnccl.so.2"), std::string::npos) << nccl_refusal();
}
TEST(NcclRelative, IsRefused) {
  EXPECT_EQ(nccl_refusal(), "TESSERA_NCCL: libnccl.so.2, a relative path, accepted an absolute one");
}

}  // namespace
}  // namespace tessera::testing
