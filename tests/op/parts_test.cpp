// Parts of a problem with their global places, and partial results that calls accumulate: together they are the whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "error_bound.hpp"
#include "execute.hpp"
#include "gpu_call.hpp"
#include "gpu_memory.hpp"
#include "plain.hpp"

namespace tessera::testing {
namespace {

struct Range {
  int64_t begin, count;
};

// [0, length) in random ranges, from a multiple of 32 on, as dropout requires of keys.
std::vector<Range> random_ranges(std::mt19937_64& random, int64_t length) {
  std::vector<Range> ranges;
  for (int64_t begin = 0; begin < length;) {
    const int64_t count = std::min<int64_t>(length - begin, 32 * static_cast<int64_t>(1 + random() % 3));
    ranges.push_back({begin, count});
    begin += count;
  }
  return ranges;
}

// The part of a tensor of scores, [B|1, H|1, Sq|1, Sk|1]; block_q, block_k: what an entry stands for.
Tensor scores_of(const Tensor& scores, Range q, Range k, int64_t block_q = 1, int64_t block_k = 1) {
  if (!scores.present()) return scores;
  const auto part = [](const Tensor& of, int dim, Range range, int64_t block) {
    if (of.layout().shape[dim] == 1) return of;
    const int64_t end = (range.begin + range.count + block - 1) / block;
    return of.slice(dim, range.begin / block, end - range.begin / block);
  };
  return part(part(scores, 2, q, block_q), 3, k, block_k);
}

// Runs a call on its outputs as they are.
void execute_on_cpu(const tessera_plan& plan, Call& call, tessera_direction direction) {
  std::vector<std::byte> workspace(tessera_workspace_bytes(&plan), std::byte{0xFF});
  const tessera_buffers buffers = call.buffers();
  const auto run = direction == TESSERA_FORWARD ? tessera_forward : tessera_backward;
  const tessera_status status = run(&plan, &buffers, workspace.data(), workspace.size(), nullptr);
  ASSERT_EQ(status.code, TESSERA_OK) << status.message;
}
void execute_on_gpu(const tessera_plan& plan, Call& call, tessera_direction direction) {
  std::vector<std::vector<std::byte>> before;  // with the other parts' rows, which share the memory
  for (const NamedTensor& output : outputs(call, direction)) before.push_back(output.tensor->bytes());
  GpuCall on_gpu(call, direction, tessera_workspace_bytes(&plan), 0xFF);
  size_t n = 0;
  for (const NamedTensor& output : outputs(call, direction)) {
    std::ranges::copy(before[n++], output.tensor->storage());
  }
  Gpu& gpu = Gpu::get();
  on_gpu.upload(gpu.stream());
  const tessera_status status = testing::execute(plan, on_gpu, gpu.stream());
  gpu.synchronize(gpu.stream());
  ASSERT_EQ(status.code, TESSERA_OK) << status.message;
  EXPECT_EQ(on_gpu.download(gpu.stream()), "");
}
void execute(Call& call, tessera_direction direction, const Place& place, tessera_kernel kernel = TESSERA_KERNEL_AUTO) {
  call.describe();
  tessera_plan plan;
  const tessera_status planned = make_plan(call, direction, {.kernel = kernel, .place = place}, plan);
  ASSERT_EQ(planned.code, TESSERA_OK) << planned.message;
  (place.backend == TESSERA_BACKEND_CUDA ? execute_on_gpu : execute_on_cpu)(plan, call, direction);
}

void fill(const Tensor& tensor, double value) {
  Tensor target = tensor;
  target.store(std::vector<double>(static_cast<size_t>(tensor.size()), value));
}

// The part of `whole` that queries `q` and keys `k` are, at their place.
Call part_of(const Call& whole, const Case& c, Range q, Range k) {
  Call part = whole;
  part.q = whole.q.slice(1, q.begin, q.count);
  part.k = whole.k.slice(1, k.begin, k.count), part.v = whole.v.slice(1, k.begin, k.count);
  part.lse = whole.lse.slice(2, q.begin, q.count), part.lse_low = whole.lse_low.slice(2, q.begin, q.count);
  part.o = whole.o.slice(1, q.begin, q.count);
  part.bias = scores_of(whole.bias, q, k), part.mask = scores_of(whole.mask, q, k);
  part.block_mask = scores_of(whole.block_mask, q, k, c.block_q, c.block_k);
  part.problem.first_q = q.begin, part.problem.total_q = c.sq;
  part.problem.first_k = k.begin, part.problem.total_k = c.sk;
  return part;
}

// Random parts of a case's problem.
struct Cut {
  explicit Cut(const Case& c) {
    std::mt19937_64 random(static_cast<uint64_t>(c.seed));
    q = random_ranges(random, c.sq), k = random_ranges(random, c.sk);
    std::shuffle(k.begin(), k.end(), random);
  }
  std::vector<Range> q, k;
};

// o and lse of the whole, from a call for each part.
void forward_by_parts(Call& whole, const Case& c, const Cut& cut, const Place& place) {
  const Tensor accumulated(TESSERA_FLOAT32, {c.b, c.sq, c.hq, c.dv});
  fill(accumulated, std::numeric_limits<double>::quiet_NaN());  // a row with lse = -inf may hold anything
  fill(whole.lse, -std::numeric_limits<double>::infinity()), fill(whole.lse_low, 0);
  for (const Range& q : cut.q) {
    for (const Range& k : cut.k) {
      const bool last = &k == &cut.k.back();
      Call part = part_of(whole, c, q, k);
      part.problem.accumulate = 1;
      if (!last) part.sink = Tensor();
      (last ? part.o_accum : part.o) = accumulated.slice(1, q.begin, q.count);
      ASSERT_NO_FATAL_FAILURE(execute(part, TESSERA_FORWARD, place));
    }
  }
}

struct GradientSums {
  Tensor d_q, d_k, d_v;
};
void backward_by_parts(const Call& whole, const Case& c, const Cut& cut, const Place& place, GradientSums& sums) {
  sums = {Tensor(TESSERA_FLOAT32, {c.b, c.sq, c.hq, c.d}), Tensor(TESSERA_FLOAT32, {c.b, c.sk, c.hkv, c.d}),
          Tensor(TESSERA_FLOAT32, {c.b, c.sk, c.hkv, c.dv})};
  for (const Tensor* sum : {&sums.d_q, &sums.d_k, &sums.d_v}) fill(*sum, 0);
  for (const Range& q : cut.q) {
    for (const Range& k : cut.k) {
      Call part = part_of(whole, c, q, k);
      part.problem.accumulate = 1;
      part.d_o = whole.d_o.slice(1, q.begin, q.count);
      if (whole.d_lse.present()) part.d_lse = whole.d_lse.slice(2, q.begin, q.count);
      part.d_q = sums.d_q.slice(1, q.begin, q.count);
      part.d_k = sums.d_k.slice(1, k.begin, k.count), part.d_v = sums.d_v.slice(1, k.begin, k.count);
      ASSERT_NO_FATAL_FAILURE(execute(part, TESSERA_BACKWARD, place));
    }
  }
}

void expect_the_whole(const char* text, int32_t dtype, const std::vector<Place>& places) {
  Case c = parse_case(text, nullptr).value();
  c.dtype = dtype, c.low = c.lse = c.backward = 1;
  c = legalised(c);
  const Inputs in = make_inputs(c);
  Call oracle = make_oracle_call(in);
  ASSERT_TRUE(run(oracle, TESSERA_FORWARD, {.kernel = TESSERA_KERNEL_REFERENCE}).ok());
  ASSERT_TRUE(run(oracle, TESSERA_BACKWARD, {.kernel = TESSERA_KERNEL_REFERENCE}).ok());
  const PlainResult plain = plain_attention(in, Precision::kSame);
  const Cut cut(c);
  for (const Place& place : places) {
    SCOPED_TRACE(place_name(place) + ": " + to_text(c));
    Call whole = make_call(in);
    ASSERT_NO_FATAL_FAILURE(forward_by_parts(whole, c, cut, place));
    EXPECT_EQ(excess_error(whole.o.load(), oracle.o.load(), plain.o, dtype), "") << "o";
    EXPECT_EQ(excess_error(whole.lse.load(), oracle.lse.load(), plain.lse, TESSERA_FLOAT32), "") << "lse";
    GradientSums sums;
    ASSERT_NO_FATAL_FAILURE(backward_by_parts(whole, c, cut, place, sums));
    EXPECT_EQ(excess_error(sums.d_q.load(), oracle.d_q.load(), plain.d_q, dtype), "") << "d_q";
    EXPECT_EQ(excess_error(sums.d_k.load(), oracle.d_k.load(), plain.d_k, dtype), "") << "d_k";
    EXPECT_EQ(excess_error(sums.d_v.load(), oracle.d_v.load(), plain.d_v, dtype), "") << "d_v";
  }
}

constexpr int32_t kDtypes[] = {TESSERA_FLOAT32, TESSERA_FLOAT16, TESSERA_BFLOAT16};

class Parts : public ::testing::TestWithParam<const char*> {};
TEST_P(Parts, AccumulateToTheWhole) {
  for (const int32_t dtype : kDtypes) expect_the_whole(GetParam(), dtype, cpu_places());
}

class GpuParts : public ::testing::TestWithParam<const char*> {};
TEST_P(GpuParts, AccumulateToTheWhole) {
  if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
  for (const int32_t dtype : kDtypes) expect_the_whole(GetParam(), dtype, {kGpu});
}

constexpr const char* kCases[] = {"b=2 sq=150 sk=210 hq=4 hkv=2 d=64 dv=64 causal=1 seed=1",
                                  "b=1 sq=140 sk=130 hq=2 hkv=1 d=40 dv=24 causal=1 top_left=1 alibi=bh seed=2",
                                  "b=2 sq=100 sk=300 hq=4 hkv=1 d=64 dv=64 wl=40 wr=25 sink=1 d_lse=1 seed=3",
                                  "b=2 sq=96 sk=160 hq=2 hkv=2 d=32 dv=32 dropout=0.3 alibi=h causal=1 seed=4",
                                  "b=2 sq=128 sk=192 hq=2 hkv=2 d=64 dv=64 bias=bhqk mask=hqk softcap=9 seed=5",
                                  "b=1 sq=128 sk=192 hq=2 hkv=1 d=64 dv=64 block_mask=bhk block_q=32 block_k=32 seed=6",
                                  "b=1 sq=3 sk=500 hq=4 hkv=2 d=64 dv=64 causal=1 sink=2 seed=7"};
INSTANTIATE_TEST_SUITE_P(Cpu, Parts, ::testing::ValuesIn(kCases));
INSTANTIATE_TEST_SUITE_P(Cuda, GpuParts, ::testing::ValuesIn(kCases));

// ---- one call's sums ------------------------------------------------------------------------------------------------

// What the sums hold before a call that adds to them.
constexpr double kHeld = 0.125;

// Gradients in float32, stored and added to: in every layout, and with the same bits again where a call is
// deterministic.
void expect_sums(const char* text, int32_t dtype, const Place& place, tessera_kernel kernel) {
  Case c = parse_case(text, nullptr).value();
  c.dtype = dtype, c.low = c.lse = c.backward = 1;
  c = legalised(c);
  const Inputs in = make_inputs(c);
  SCOPED_TRACE(place_name(place) + ": " + to_text(c));
  Call oracle = make_oracle_call(in);
  ASSERT_TRUE(run(oracle, TESSERA_FORWARD, {.kernel = TESSERA_KERNEL_REFERENCE}).ok());
  ASSERT_TRUE(run(oracle, TESSERA_BACKWARD, {.kernel = TESSERA_KERNEL_REFERENCE}).ok());
  const PlainResult plain = plain_attention(in, Precision::kSame);
  Call call = make_call(in);
  const RunResult forward = run(call, TESSERA_FORWARD, {.place = place});
  ASSERT_TRUE(forward.ok()) << forward.why();
  const struct {
    const char* name;
    Tensor& sum;
    const Tensor& oracle;
    const PlainTensor& plain;
  } gradients[] = {{"d_q", call.d_q, oracle.d_q, plain.d_q},
                   {"d_k", call.d_k, oracle.d_k, plain.d_k},
                   {"d_v", call.d_v, oracle.d_v, plain.d_v}};
  for (const auto& [name, sum, of_oracle, of_plain] : gradients) {
    const tessera_layout& layout = sum.layout();
    sum = Tensor(TESSERA_FLOAT32, {layout.shape, layout.shape + layout.rank}, {.order = {}, .gap = c.gap});
  }
  for (const int accumulate : {0, 1, 1}) {
    std::vector<std::vector<std::byte>> before;
    for (const auto& [name, sum, of_oracle, of_plain] : gradients) {
      before.push_back(sum.bytes());
      fill(sum, accumulate ? kHeld : std::numeric_limits<double>::quiet_NaN());
    }
    const bool again = call.problem.accumulate == 1;
    call.problem.accumulate = accumulate;
    ASSERT_NO_FATAL_FAILURE(execute(call, TESSERA_BACKWARD, place, kernel));
    size_t n = 0;
    for (const auto& [name, sum, of_oracle, of_plain] : gradients) {
      EXPECT_TRUE(sum.unharmed_outside()) << name;
      std::vector<double> gradient = sum.load();
      for (double& value : gradient) value -= accumulate * kHeld;
      EXPECT_EQ(excess_error(gradient, of_oracle.load(), of_plain, dtype), "") << name << ", accumulate " << accumulate;
      if (again && c.deterministic) {
        EXPECT_EQ(sum.bytes(), before[n]) << name;
      }
      ++n;
    }
  }
}

constexpr const char* kSums[] = {
    "b=2 sq=150 sk=210 hq=2 hkv=2 d=128 dv=128 causal=1 deterministic=1 seed=1",
    "b=3 sq=100 sk=200 hq=4 hkv=2 d=64 dv=64 q=packed k=packed lead=2 used=1 causal=1 seed=2",
    "b=1 sq=70 sk=300 hq=4 hkv=1 d=96 dv=96 wl=50 sink=1 d_sink=1 seed=3",
    "b=2 sq=70 sk=90 hq=4 hkv=2 d=40 dv=24 gap=3 bias=hk d_bias=1 deterministic=1 seed=4",
    "b=1 sq=70 sk=200 hq=2 hkv=2 d=64 dv=64 bias=hqk mask=hqk dropout=0.2 seed=5",
    "b=2 sq=40 sk=70 hq=1 hkv=1 d=33 dv=65 used=1 order=bhsd seed=6",
    "b=1 sq=70 sk=130 hq=2 hkv=1 d=192 dv=128 causal=1 seed=7",
    "b=1 sq=70 sk=150 hq=2 hkv=2 d=248 dv=256 used=1 deterministic=1 seed=8",
    "b=1 sq=40 sk=150 hq=1 hkv=1 d=512 dv=264 causal=1 seed=9"};
class Sums : public ::testing::TestWithParam<const char*> {};
TEST_P(Sums, AreStoredAndAddedTo) {
  for (const int32_t dtype : kDtypes) {
    for (const Place& place : cpu_places()) expect_sums(GetParam(), dtype, place, TESSERA_KERNEL_AUTO);
  }
}
class GpuSums : public ::testing::TestWithParam<const char*> {};
TEST_P(GpuSums, AreStoredAndAddedTo) {
  if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
  for (const int32_t dtype : kDtypes) {
    expect_sums(GetParam(), dtype, kGpu, TESSERA_KERNEL_AUTO);
    if (dtype == TESSERA_BFLOAT16) expect_sums(GetParam(), dtype, kGpu, TESSERA_KERNEL_BWD_SM80);
  }
}
INSTANTIATE_TEST_SUITE_P(Cpu, Sums, ::testing::ValuesIn(kSums));
INSTANTIATE_TEST_SUITE_P(Cuda, GpuSums, ::testing::ValuesIn(kSums));

// ---- heads and sequences --------------------------------------------------------------------------------------------

// A rank that has some of the heads and sequences drops the entries that the whole drops, and reads the slopes of its
// heads.
TEST(Parts, HeadsAndSequencesAreThoseOfTheWhole) {
  const Case c = *parse_case("b=3 sq=70 sk=96 hq=6 hkv=3 d=32 dv=32 dropout=0.4 alibi=h causal=1", nullptr);
  const Inputs in = make_inputs(c);
  Call whole = make_call(in);
  for (const Place& place : cpu_places()) {
    SCOPED_TRACE(place_name(place));
    ASSERT_TRUE(run(whole, TESSERA_FORWARD, {.place = place}).ok());
    for (int64_t b = 0; b < c.b; ++b) {
      for (int64_t kv = 0; kv < c.hkv; ++kv) {
        Call part = make_call(in);
        const auto own = [&](const Tensor& of, int64_t first, int64_t count) {
          return of.slice(0, b, 1).slice(2, first, count);
        };
        part.q = own(part.q, 2 * kv, 2), part.k = own(part.k, kv, 1), part.v = own(part.v, kv, 1);
        part.o = Tensor(TESSERA_FLOAT32, {1, c.sq, 2, c.dv});
        part.lse = Tensor(TESSERA_FLOAT32, {1, 2, c.sq});
        part.slopes = part.slopes.slice(0, 2 * kv, 2);
        part.problem.first_head = 2 * kv, part.problem.total_heads = c.hq, part.problem.first_sequence = b;
        part.describe();
        const RunResult result = run(part, TESSERA_FORWARD, {.place = place});
        ASSERT_TRUE(result.ok()) << result.why();
        EXPECT_EQ(part.o.load(), own(whole.o, 2 * kv, 2).load());
      }
    }
  }
}

}  // namespace
}  // namespace tessera::testing
