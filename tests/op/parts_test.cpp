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
void execute(Call& call, tessera_direction direction, const Place& place) {
  call.describe();
  tessera_plan plan;
  const tessera_status planned = make_plan(call, direction, {.place = place}, plan);
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

struct Sums {
  Tensor d_q, d_k, d_v;
};
void backward_by_parts(const Call& whole, const Case& c, const Cut& cut, const Place& place, Sums& sums) {
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

void expect_the_whole(const char* text, int32_t dtype, const std::vector<Place>& places, bool backward) {
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
    if (!backward) continue;
    Sums sums;
    ASSERT_NO_FATAL_FAILURE(backward_by_parts(whole, c, cut, place, sums));
    EXPECT_EQ(excess_error(sums.d_q.load(), oracle.d_q.load(), plain.d_q, dtype), "") << "d_q";
    EXPECT_EQ(excess_error(sums.d_k.load(), oracle.d_k.load(), plain.d_k, dtype), "") << "d_k";
    EXPECT_EQ(excess_error(sums.d_v.load(), oracle.d_v.load(), plain.d_v, dtype), "") << "d_v";
  }
}

constexpr int32_t kDtypes[] = {TESSERA_FLOAT32, TESSERA_FLOAT16, TESSERA_BFLOAT16};

class Parts : public ::testing::TestWithParam<const char*> {};
TEST_P(Parts, AccumulateToTheWhole) {
  for (const int32_t dtype : kDtypes) expect_the_whole(GetParam(), dtype, cpu_places(), true);
}

// Forward: gradients do not accumulate on a GPU.
class GpuParts : public ::testing::TestWithParam<const char*> {};
TEST_P(GpuParts, AccumulateToTheWhole) {
  if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
  for (const int32_t dtype : kDtypes) expect_the_whole(GetParam(), dtype, {kGpu}, false);
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
