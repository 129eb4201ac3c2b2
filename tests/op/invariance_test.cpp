// batch_invariant: a sequence alone gives the bits that it gives within a batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "execute.hpp"

namespace tessera::testing {
namespace {

constexpr const char* kCases[] = {
    "dtype=f32 b=3 sq=70 sk=150 hq=4 hkv=2 d=64 dv=64 causal=1",
    "dtype=bf16 b=3 sq=70 sk=150 hq=4 hkv=2 d=64 dv=64 wl=30 wr=10 used=1",
    "dtype=f16 b=4 sq=100 sk=200 hq=2 hkv=1 d=40 dv=24 q=packed k=packed causal=1",
    "dtype=bf16 b=5 sq=260 sk=260 hq=2 hkv=2 d=64 dv=64 q=packed k=packed bias=bhqk mask=hqk sink=1 cores=8",
    "dtype=f32 b=4 sq=1 sk=3000 hq=4 hkv=1 d=64 dv=64 used=1 cores=16",
    "dtype=bf16 b=6 sq=1 sk=2000 hq=8 hkv=2 d=128 dv=128 k=paged page=16 cores=8",
    "dtype=f32 b=4 sq=3 sk=900 hq=4 hkv=2 d=64 dv=64 q=packed k=paged page=64 causal=1 alibi=bh softcap=9",
    "dtype=f32 b=2 sq=500 sk=500 hq=2 hkv=1 d=64 dv=64 block_mask=bhk cores=6",
    "dtype=bf16 b=4 sq=300 sk=300 hq=4 hkv=2 d=128 dv=128 q=packed k=packed causal=1",
    "dtype=f16 b=5 sq=260 sk=500 hq=2 hkv=1 d=64 dv=64 q=packed k=packed",
    "dtype=bf16 b=3 sq=200 sk=400 hq=2 hkv=2 d=256 dv=256 used=1 causal=1 sink=1",
    "dtype=bf16 b=4 sq=200 sk=400 hq=4 hkv=2 d=128 dv=128 k=paged page=64 causal=1",
    "dtype=bf16 b=6 sq=700 sk=1100 hq=2 hkv=1 d=64 dv=64 wl=300 wr=0 cores=8",
    "dtype=bf16 data=growing b=4 sq=200 sk=600 hq=2 hkv=1 d=128 dv=128 q=packed k=packed",
    "dtype=f32 b=6 few=1 sq=100 sk=3000 hq=4 hkv=2 d=64 dv=64 q=packed k=paged page=16 causal=1 cores=8",
    "dtype=bf16 b=7 few=20 sq=100 sk=2100 hq=8 hkv=2 d=128 dv=128 q=packed k=packed causal=1 cores=16",
    "dtype=f16 b=5 few=5 sq=40 sk=1500 hq=16 hkv=2 d=40 dv=24 q=packed k=paged page=64 alibi=bh sink=1",
    "dtype=f32 b=4 few=9 sq=60 sk=300 hq=4 hkv=1 d=32 dv=32 q=packed k=paged page=16 causal_seqs=1",
    "dtype=f32 b=4 few=9 sq=60 sk=300 hq=4 hkv=1 d=32 dv=32 q=packed k=paged page=16 csr=1 causal=1",
    "dtype=bf16 b=4 few=9 sq=60 sk=300 hq=4 hkv=1 d=64 dv=64 q=packed k=paged page=16 tree=2 causal=1",
    "dtype=bf16 b=5 sq=300 sk=500 hq=2 hkv=1 d=64 dv=64 q=packed k=packed mask_mod='(q_pos - j) % 300 < 200'",
    "dtype=f16 b=4 few=3 sq=200 sk=500 hq=2 hkv=1 d=128 dv=128 q=packed k=paged page=16 causal=1 "
    "mask_mod='i // 100 % 3 == j // 130 % 3'",
    "dtype=bf16 data=nan_query b=4 sq=200 sk=300 hq=2 hkv=1 d=64 dv=64 q=packed k=packed",
};

// Sequence b of a call, in the same memory but for its outputs.
Call sequence(const Inputs& in, const Call& batch, int64_t b) {
  const Case& c = in.c;
  const auto dtype = static_cast<int32_t>(c.dtype);
  const bool packed_q = c.q_form == kPacked, packed_k = c.k_form == kPacked;
  const int64_t sq = in.sq[b], sk = in.k_rows[b];
  const auto offsets = [](int64_t length) {
    Tensor tensor(TESSERA_INT32, {2});
    tensor.store({0, static_cast<double>(length)});
    return tensor;
  };
  const auto own = [&](const Tensor& tensor) {
    return tensor.present() && tensor.layout().shape[0] == c.b ? tensor.slice(0, b, 1) : tensor;
  };
  Call one = batch;
  one.q = packed_q ? batch.q.slice(0, in.q_begin[b], sq) : own(batch.q);
  if (packed_q) one.cu_seqlens_q = offsets(sq);
  if (packed_k) one.cu_seqlens_k = offsets(sk);
  if (c.k_form != kPaged) {
    one.k = packed_k ? batch.k.slice(0, in.k_begin[b], sk) : own(batch.k);
    one.v = packed_k ? batch.v.slice(0, in.k_begin[b], sk) : own(batch.v);
  }
  one.o = packed_q ? Tensor(dtype, {sq, c.hq, c.dv}) : Tensor(dtype, {1, c.sq, c.hq, c.dv});
  one.lse = packed_q ? Tensor(TESSERA_FLOAT32, {c.hq, sq}) : Tensor(TESSERA_FLOAT32, {1, c.hq, c.sq});
  one.seqused_k = own(batch.seqused_k);
  one.page_table = own(batch.page_table);
  if (c.csr) one.page_indptr = batch.page_indptr.slice(0, b, 2);
  one.slopes = c.alibi == 2 ? own(batch.slopes) : batch.slopes;
  for (Tensor* scores : {&one.bias, &one.mask}) {
    *scores = own(*scores);
    if (scores->present() && packed_q && scores->layout().shape[2] > 1) *scores = scores->slice(2, 0, sq);
    if (scores->present() && packed_k) *scores = scores->slice(3, 0, sk);
  }
  one.block_mask = own(batch.block_mask);
  one.causal_seqs = own(batch.causal_seqs);
  one.tree = packed_q && c.tree ? batch.tree.slice(0, in.q_begin[b], sq) : own(batch.tree);
  if (packed_q) one.problem.max_seqlen_q = sq;
  if (packed_k) one.problem.max_seqlen_k = sk;
  one.describe();
  return one;
}

// NaN equals itself here.
bool same(const std::vector<double>& a, const std::vector<double>& b) {
  return std::ranges::equal(a, b, [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); });
}

void expect_same_bits_alone(const char* text, const std::vector<Place>& places) {
  Case c = legalised(*parse_case(text, nullptr));
  c.invariant = 1;
  const Inputs in = make_inputs(c);
  for (const Place& place : places) {
    Call batch = make_call(in);
    const RunOptions options{.place = place, .threads = 2, .cores = static_cast<int32_t>(c.cores)};
    const RunResult result = run(batch, TESSERA_FORWARD, options);
    ASSERT_TRUE(result.ok()) << result.why();
    for (int64_t b = 0; b < c.b; ++b) {
      // Bias and masks state a packed problem's lengths, and cannot be of length 0 there.
      if (in.sq[b] == 0 || in.k_rows[b] == 0) continue;
      Call one = sequence(in, batch, b);
      const RunResult alone = run(one, TESSERA_FORWARD, options);
      ASSERT_TRUE(alone.ok()) << alone.why();
      const bool packed = c.q_form == kPacked;
      const Tensor o = packed ? batch.o.slice(0, in.q_begin[b], in.sq[b]) : batch.o.slice(0, b, 1);
      const Tensor lse = packed ? batch.lse.slice(1, in.q_begin[b], in.sq[b]) : batch.lse.slice(0, b, 1);
      EXPECT_TRUE(same(one.o.load(), o.load())) << place_name(place) << ", sequence " << b << " of " << to_text(c);
      EXPECT_TRUE(same(one.lse.load(), lse.load())) << place_name(place) << ", sequence " << b << " of " << to_text(c);
    }
  }
}

class BatchInvariance : public ::testing::TestWithParam<const char*> {};

TEST_P(BatchInvariance, ASequenceAloneGivesTheSameBits) { expect_same_bits_alone(GetParam(), cpu_places()); }

INSTANTIATE_TEST_SUITE_P(Case, BatchInvariance, ::testing::ValuesIn(kCases));

// With AMX's tiles and vectors in one plan: lengths must not decide between the two.
class AmxBatchInvariance : public ::testing::TestWithParam<const char*> {};

TEST_P(AmxBatchInvariance, ASequenceAloneGivesTheSameBits) {
  if (cpu_device().isa_limit != TESSERA_ISA_AMX_BF16) GTEST_SKIP() << "skipped: no AMX here, and none emulated";
  expect_same_bits_alone(GetParam(), {{.isa = TESSERA_ISA_AMX_BF16, .vector_isa = TESSERA_ISA_AVX512}});
}

INSTANTIATE_TEST_SUITE_P(Case, AmxBatchInvariance, ::testing::ValuesIn(kCases));

class GpuBatchInvariance : public ::testing::TestWithParam<const char*> {};

TEST_P(GpuBatchInvariance, ASequenceAloneGivesTheSameBits) {
  if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
  if (!served_by_gpu(*parse_case(GetParam(), nullptr), gpu_device().arch)) {
    GTEST_SKIP() << "skipped: no kernel of this GPU takes the case";
  }
  expect_same_bits_alone(GetParam(), {kGpu});
}

INSTANTIATE_TEST_SUITE_P(Cuda, GpuBatchInvariance, ::testing::ValuesIn(kCases));

}  // namespace
}  // namespace tessera::testing
