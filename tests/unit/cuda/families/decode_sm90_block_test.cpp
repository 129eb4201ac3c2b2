// decode_sm90, kernels/tessera/decode_sm90, as a plan launches it, run on the host (tests/emulated_gpu) on cases like
// those of the table and compared with the float64 reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda/cuda.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "op/case.hpp"
#include "op/error_bound.hpp"
#include "op/execute.hpp"
#include "op/inputs.hpp"
#include "op/numbers.hpp"
#include "op/plain.hpp"
#include "tessera/decode_sm90/kernel.cuh"
#include "unit_launch.hpp"

namespace tessera::cuda {
namespace {

using testing::Call;
using testing::Inputs;

// ---- the configs of the cases ---------------------------------------------------------------------------------------

// Wide: tiles of 32 keys, of codes at D = 64 by TMA of 64, not of 16. Codes: K and V of e4m3; by key: with scales of
// 128 keys or, in pages, of each. Two or four boxes: a tile is loaded from so many pages. Eight, 32: rows of a work
// tile, otherwise 16.
enum Options {
  kNone = 0,
  kTree = 1,
  kCausalSeqs = 2,
  kCapped = 4,
  kWide = 8,
  kCodes = 16,
  kByKey = 32,
  kTwoBoxes = 64,
  kEight = 128,
  k32 = 256,
  kFourBoxes = 512
};

constexpr DecodeSm90Config config(Dtype dtype, int head_dim, int warps, bool paged, bool varlen, bool invariant,
                                  bool bulk, int options) {
  DecodeSm90Config c{};
  const bool wide = options & kWide;
  c.dtype = dtype, c.head_dim = head_dim, c.block_n = wide ? 32 : 16, c.warps = warps;
  c.stages = head_dim <= 64 && !wide ? 2 : 1;
  c.cache = options & kCodes ? Dtype::kFloat8E4M3 : dtype, c.key_scales = options & kByKey;
  if (c.codes() && head_dim <= 64) c.block_n = !wide ? 16 : bulk ? 64 : 32, c.stages = wide && bulk ? 1 : 2;
  c.rows = options & kEight ? 8 : options & k32 ? 32 : kDecodeRows;
  c.paged = paged, c.varlen = varlen, c.invariant = invariant, c.bulk = bulk,
  c.boxes = options & kTwoBoxes    ? 2
            : options & kFourBoxes ? 4
                                   : 1;
  c.score.tree_mask = options & kTree, c.score.causal_seqs = options & kCausalSeqs;
  c.score.softcap = c.score.alibi = (options & kCapped) != 0;
  return c;
}
constexpr Dtype kBf16 = Dtype::kBFloat16, kF16 = Dtype::kFloat16;

// Runs the launch if it is of this config.
template <DecodeSm90Config kConfig>
bool try_config(const Launch& launch, const DecodeSm90Params& params) {
  DecodeSm90Config config = kConfig;
  if (config_values(config).value != launch.values.value) return false;
  return emulated::run_blocks({.x = launch.grid.x}, launch.spec().threads, launch.spec().smem_bytes,
                              [&] { decode_sm90<kConfig>(params); }) == 0;
}

bool run_config(const Launch& launch, const DecodeSm90Params& p) {
  return try_config<config(kBf16, 128, 8, false, false, false, true, kNone)>(launch, p) ||
         try_config<config(kBf16, 128, 8, true, true, false, true, kNone)>(launch, p) ||
         try_config<config(kBf16, 128, 8, true, true, false, false, kNone)>(launch, p) ||
         try_config<config(kF16, 64, 8, true, true, false, false, kNone)>(launch, p) ||
         try_config<config(kF16, 112, 8, false, false, false, false, kNone)>(launch, p) ||
         try_config<config(kBf16, 256, 8, true, true, true, true, kNone)>(launch, p) ||
         try_config<config(kBf16, 64, 8, true, true, false, true, kTree)>(launch, p) ||
         try_config<config(kF16, 128, 8, false, false, false, true, kTree)>(launch, p) ||
         try_config<config(kF16, 64, 8, false, true, false, true, kTree | kWide)>(launch, p) ||
         try_config<config(kBf16, 64, 8, true, true, false, false, kTree)>(launch, p) ||
         try_config<config(kBf16, 64, 8, true, true, false, true, kTree | kCapped | kWide)>(launch, p) ||
         try_config<config(kBf16, 64, 8, false, true, false, true, kCausalSeqs | kWide)>(launch, p) ||
         try_config<config(kF16, 64, 8, true, true, true, true, kTree | kCausalSeqs)>(launch, p) ||
         try_config<config(kBf16, 128, 8, false, false, false, true, kCodes | kEight)>(launch, p) ||
         try_config<config(kBf16, 128, 8, false, false, false, true, kCodes | kByKey | kEight)>(launch, p) ||
         try_config<config(kBf16, 128, 8, true, true, false, true, kWide | kCodes | kByKey)>(launch, p) ||
         try_config<config(kBf16, 128, 8, true, true, false, false, kWide | kCodes | kByKey)>(launch, p) ||
         try_config<config(kBf16, 128, 8, true, true, false, false, kCodes | kByKey)>(launch, p) ||
         try_config<config(kBf16, 64, 8, true, true, false, true, kCodes | kEight)>(launch, p) ||
         try_config<config(kBf16, 128, 8, true, true, false, true, kWide | kCodes | kByKey | kTwoBoxes)>(launch, p) ||
         try_config<config(kF16, 64, 8, true, true, false, true, kWide | kCodes | kByKey | kEight | kFourBoxes)>(launch,
                                                                                                                 p) ||
         try_config<config(kBf16, 64, 8, true, true, false, true, kWide | kCodes | kByKey | kTwoBoxes)>(launch, p) ||
         try_config<config(kBf16, 128, 8, true, true, false, true, kWide | kCodes | kByKey | kTwoBoxes | k32)>(launch,
                                                                                                               p) ||
         try_config<config(kBf16, 64, 8, false, false, false, true, kWide | kCodes | k32)>(launch, p) ||
         try_config<config(kBf16, 256, 8, false, false, false, true, kWide | kCodes)>(launch, p) ||
         try_config<config(kBf16, 256, 8, false, false, false, true, kNone)>(launch, p) ||
         try_config<config(kF16, 256, 8, true, true, true, false, kCodes)>(launch, p) ||
         try_config<config(kBf16, 64, 8, false, true, false, false, kCodes | kByKey)>(launch, p);
}

// ---- a case ---------------------------------------------------------------------------------------------------------

// Tensors that start at multiples of 16 bytes, as a GPU's do.
class Copies {
 public:
  void* address(const testing::Tensor& tensor) {
    if (!tensor.present()) return nullptr;
    auto& copy = copies_[tensor.storage()];
    const auto offset = static_cast<size_t>(static_cast<std::byte*>(tensor.data()) - tensor.storage());
    if (!copy.memory) {
      const auto bytes = static_cast<size_t>(tensor.storage_bytes());
      copy.memory = std::make_unique<std::byte[]>(bytes + kAlignment);
      const auto start = reinterpret_cast<size_t>(copy.memory.get()) + offset;
      copy.at = copy.memory.get() + (kAlignment - start % kAlignment) % kAlignment;
      std::memcpy(copy.at, tensor.storage(), bytes);
    }
    return copy.at + offset;
  }
  void take_back(const testing::Tensor& tensor) {
    if (tensor.present())
      std::memcpy(tensor.storage(), copies_.at(tensor.storage()).at, static_cast<size_t>(tensor.storage_bytes()));
  }

 private:
  static constexpr size_t kAlignment = 128;
  struct Copy {
    std::unique_ptr<std::byte[]> memory;
    std::byte* at;
  };
  std::map<const std::byte*, Copy> copies_;
};

TensorMap map_of(const DecodeSm90Params& p, const RowTensor& tensor, int cols, int box_rows, Dtype cache) {
  const bool paged = p.keys.table != nullptr, packed = !paged && p.keys.begins != nullptr;
  const int batches = paged    ? p.keys.pages
                      : packed ? 1
                               : p.batch,
            rows = paged    ? p.keys.page_size
                   : packed ? p.keys_limit
                            : p.seqlen_k;
  constexpr int kBFloat16 = 9, kSwizzle128B = 3;
  const int bytes = dtype_bytes(cache), elements = cols * bytes / 2;  // of 16 bits
  EmulatedTensorMap map{.magic = EmulatedTensorMap::kMagic,
                        .type = kBFloat16,
                        .swizzle = kSwizzle128B,
                        .rank = 4,
                        .address = reinterpret_cast<uint64_t>(tensor.data),
                        .extents = {},
                        .box = {kChunkCols, static_cast<uint16_t>(box_rows), 1, 1, 1},
                        .element_bytes = 2,
                        .strides = {},
                        .unused = {}};
  const int extents[] = {elements, rows, p.heads_kv.value, batches, 1};
  std::copy(std::begin(extents), std::end(extents), map.extents);
  const auto in_bytes = [bytes](int64 stride) { return static_cast<uint64_t>(stride) * static_cast<uint64_t>(bytes); };
  map.strides[0] = in_bytes(tensor.row), map.strides[1] = in_bytes(tensor.head),
  map.strides[2] = in_bytes(tensor.batch);
  TensorMap opaque;
  std::memcpy(static_cast<void*>(&opaque), &map, sizeof map);
  return opaque;
}

// `kernel` makes so many launches of decode_sm90 of a case, which agree with the oracle.
void expect_agreement(const char* text, tessera_kernel kernel, int launches) {
  const auto parsed = testing::parse_case(text, nullptr);
  ASSERT_TRUE(parsed);
  const Inputs in = testing::make_inputs(testing::legalised(*parsed));
  Call call = testing::make_call(in), oracle = testing::make_oracle_call(in);
  ASSERT_TRUE(testing::run(oracle, TESSERA_FORWARD, {.kernel = TESSERA_KERNEL_REFERENCE}).ok());

  tessera_device device = testing::imagined_gpu(90);
  device.cores = static_cast<int32_t>(in.c.cores);
  device.kernel = kernel;
  tessera_plan plan;
  const tessera_problem problem = testing::problem_of(call, TESSERA_FORWARD);
  const tessera_status planned = tessera_make_plan(&problem, &device, &plan);
  ASSERT_EQ(planned.code, TESSERA_OK) << planned.message;

  Copies copies;
  call.o.poison(), call.lse.poison();
  const tessera_buffers buffers = call.buffers([&](const testing::Tensor& tensor) { return copies.address(tensor); });
  std::vector<char> workspace(tessera_workspace_bytes(&plan) + 64, '\xff');
  const auto at = (reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64;
  LaunchList list;
  const tessera_status lowered = lower(plan, buffers, reinterpret_cast<void*>(at), list);
  ASSERT_EQ(lowered.code, TESSERA_OK) << lowered.message;
  ASSERT_EQ(list.size(), launches);
  DecodeSm90Params params;
  for (int call = 0; call < 2; ++call) {  // counters are left as the next call needs them
    for (const Launch& launch : list) {
      ASSERT_STREQ(launch.name, "decode_sm90");
      std::memcpy(static_cast<void*>(&params), launch.params, sizeof params);
      const auto cache = static_cast<Dtype>(problem.k.dtype);
      const std::string& text = launch.spec().config;
      const auto boxes = text.find(".boxes = ");
      const int rows = plan.steps[0].block_n / (boxes == std::string::npos ? 1 : std::stoi(text.substr(boxes + 9)));
      params.k_map = map_of(params, params.k, params.head_dim, rows, cache);
      params.v_map = map_of(params, params.v, params.head_dim_v, rows, cache);
      ASSERT_TRUE(run_config(launch, params)) << launch.spec().config;
    }
  }

  copies.take_back(call.o), copies.take_back(call.lse);
  if (problem
          .batch_invariant) {  // the same bits where one group of blocks has all parts, none of them in the workspace
    const auto o = call.o.bytes(), lse = call.lse.bytes();
    Launch by_one_group = list[0];
    by_one_group.grid.x = static_cast<unsigned>(params.group_blocks.value), params.block_groups = Divisor(1);
    ASSERT_TRUE(run_config(by_one_group, params));
    copies.take_back(call.o), copies.take_back(call.lse);
    EXPECT_TRUE(call.o.bytes() == o && call.lse.bytes() == lse) << "bits depend on who has the parts";
  }
  const testing::PlainResult plain = testing::plain_attention(in, testing::Precision::kSame);
  const auto compare = [&](const char* name, const testing::Tensor& got, const testing::Tensor& exact,
                           const testing::PlainTensor& same) {
    const std::vector<double> value = got.load(), expected = exact.load();
    EXPECT_TRUE(got.unharmed_outside()) << name;
    for (size_t n = 0; n < value.size(); ++n) {
      ASSERT_EQ(std::isfinite(value[n]), std::isfinite(expected[n])) << name << "[" << n << "] is " << value[n];
      if (!std::isfinite(expected[n])) {
        ASSERT_EQ(value[n], expected[n]) << name << "[" << n << "]";
      }
    }
    EXPECT_EQ(testing::excess_error(value, expected, same, got.layout().dtype), "") << name;
  };
  compare("o", call.o, oracle.o, plain.o);
  compare("lse", call.lse, oracle.lse, plain.lse);
}

class DecodeSm90Block : public ::testing::TestWithParam<const char*> {};
TEST_P(DecodeSm90Block, AgreesWithTheOracle) { expect_agreement(GetParam(), TESSERA_KERNEL_DECODE_SM90, 1); }

// A chunk with sequences of few queries: two launches, each of which skips the sequences of the other.
class MixedSm90Block : public ::testing::TestWithParam<const char*> {};
TEST_P(MixedSm90Block, AgreesWithTheOracle) { expect_agreement(GetParam(), TESSERA_KERNEL_MIXED_SM90, 2); }

INSTANTIATE_TEST_SUITE_P(
    Case, MixedSm90Block,
    ::testing::Values(
        "dtype=bf16 b=4 few=3 sq=20 sk=900 hq=8 hkv=2 d=128 dv=128 k=paged page=16 csr=1 causal=1 q=packed "
        "lead=2 tail=3 cores=17",
        "dtype=bf16 b=9 few=4 sq=32 sk=700 hq=8 hkv=2 d=128 dv=128 k=paged page=16 causal=1 q=packed cores=33"));

INSTANTIATE_TEST_SUITE_P(
    Case, DecodeSm90Block,
    ::testing::Values(
        "dtype=bf16 b=2 sq=1 sk=1500 hq=4 hkv=2 d=128 dv=128 cores=5",
        "dtype=bf16 b=5 sq=2 sk=700 hq=4 hkv=2 d=128 dv=128 k=paged page=16 csr=1 causal=1 q=packed lead=2 tail=3 "
        "cores=5",
        "dtype=f16 b=4 sq=3 sk=400 hq=4 hkv=4 d=64 dv=64 k=paged page=7 csr=1 causal=1 cores=7",
        "dtype=bf16 b=3 sq=2 sk=1100 hq=4 hkv=2 d=256 dv=256 k=paged page=64 causal=1 invariant=1 cores=4",
        "dtype=bf16 b=3 sq=8 sk=3000 hq=2 hkv=1 d=256 dv=256 k=paged page=64 invariant=1 cores=9",
        // K and V of 8 bits: tiles of 32 keys by TMA, of one page or of two, rows by cp.async; scales of each shape.
        // Few keys by tiles of 16.
        "dtype=bf16 kv=e4m3 b=2 sq=1 sk=1500 hq=4 hkv=2 d=128 dv=128 scales=bh cores=5",
        "dtype=bf16 kv=e4m3 b=2 sq=3 sk=1500 hq=4 hkv=2 d=128 dv=128 scales=fine causal=1 cores=5",
        "dtype=bf16 kv=e4m3 b=2 sq=3 sk=4500 hq=8 hkv=2 d=128 dv=112 k=paged page=64 csr=1 causal=1 q=packed lead=2 "
        "scales=fine cores=5",
        "dtype=bf16 kv=e4m3 b=2 sq=3 sk=4500 hq=8 hkv=2 d=128 dv=112 k=paged page=16 csr=1 causal=1 q=packed lead=2 "
        "scales=fine cores=5",
        "dtype=bf16 kv=e4m3 b=2 sq=3 sk=4500 hq=8 hkv=2 d=128 dv=112 k=paged page=7 csr=1 causal=1 q=packed lead=2 "
        "scales=fine cores=5",
        "dtype=bf16 kv=e4m3 b=2 sq=3 sk=900 hq=8 hkv=2 d=128 dv=112 k=paged page=7 csr=1 causal=1 q=packed lead=2 "
        "scales=fine cores=5",
        "dtype=bf16 kv=e4m3 b=2 sq=3 sk=4500 hq=8 hkv=2 d=128 dv=112 k=paged page=7 csr=1 causal=1 q=packed lead=2 "
        "scales=fine cores=5",
        "dtype=bf16 kv=e4m3 b=2 sq=1 sk=900 hq=4 hkv=1 d=64 dv=64 k=paged page=16 scales=h cores=5",
        "dtype=f16 kv=e4m3 b=3 sq=2 sk=2800 hq=4 hkv=2 d=64 dv=64 k=paged page=48 scales=fine causal=1 used=1 cores=3",
        // Tiles of 64 keys from two pages; work tiles of 32 rows, one full and one not, of one sequence and of several.
        "dtype=bf16 kv=e4m3 b=2 sq=3 sk=4200 hq=8 hkv=2 d=64 dv=64 k=paged page=32 scales=fine causal=1 cores=3",
        "dtype=bf16 kv=e4m3 b=3 sq=11 sk=1400 hq=8 hkv=2 d=128 dv=128 k=paged page=16 scales=fine causal=1 used=1 "
        "cores=9",
        // Up to eight parts of several rows are merged at once: an odd number of rows, and more parts.
        "dtype=bf16 kv=e4m3 b=2 sq=5 sk=900 hq=6 hkv=2 d=256 dv=240 scales=bh cores=12",
        "dtype=bf16 b=2 sq=4 sk=900 hq=8 hkv=2 d=256 dv=256 cores=9",
        "dtype=bf16 b=1 sq=3 sk=900 hq=5 hkv=1 d=256 dv=256 cores=11",
        "dtype=bf16 kv=e4m3 b=2 sq=6 sk=8300 hq=4 hkv=1 d=64 dv=64 scales=bh cores=5",
        "dtype=f16 kv=e4m3 b=3 sq=2 sk=1100 hq=4 hkv=2 d=256 dv=240 k=paged page=9 causal=1 invariant=1 scales=h "
        "cores=4",
        "dtype=bf16 kv=e4m3 b=3 sq=4 sk=500 hq=8 hkv=2 d=64 dv=48 q=packed k=packed reversed=1 scales=fine lead=3 "
        "tail=4 cores=7",
        // One sequence; pages of fewer keys than a tile's, with more tiles a warp than entries come at once.
        "dtype=bf16 b=1 sq=1 sk=900 hq=8 hkv=2 d=128 dv=128 k=paged page=16 cores=5",
        "dtype=bf16 b=2 sq=1 sk=4500 hq=8 hkv=2 d=128 dv=128 k=paged page=16 cores=5",  // so many by TMA
        // So many parts that they are merged in two levels.
        "dtype=bf16 b=2 sq=1 sk=4200 hq=8 hkv=1 d=128 dv=128 k=paged page=16 cores=100",
        "dtype=bf16 b=1 sq=4 sk=3137 hq=4 hkv=1 d=128 dv=128 cores=49",
        "dtype=f16 b=3 sq=1 sk=1300 hq=4 hkv=2 d=64 dv=64 used=1 tree=1 cores=5",
        "dtype=f16 b=1 sq=3 sk=1500 hq=4 hkv=2 d=64 dv=64 k=paged page=1 causal=1 cores=5",
        "dtype=f16 b=1 sq=1 sk=2000 hq=2 hkv=2 d=64 dv=64 k=paged page=3 cores=2",
        "dtype=f16 b=9 sq=1 sk=700 hq=2 hkv=1 d=64 dv=64 k=paged page=2 csr=1 cores=3",
        // Rows that a tile's columns do not end with, and those that TMA does not take: with a part of 16 bytes, from
        // the last to the first.
        "dtype=f16 b=3 sq=1 sk=700 hq=4 hkv=2 d=56 dv=40 k=paged page=3 cores=3",
        "dtype=f16 b=2 sq=2 sk=700 hq=4 hkv=2 d=100 dv=108 gap=4 cores=5",
        "dtype=f16 b=2 sq=2 sk=600 hq=4 hkv=2 d=112 dv=112 reversed=1 cores=5",
        // Several work tiles of a head's rows, side by side in a group of blocks; sequences with fewer, which some of
        // its blocks pass over.
        "dtype=bf16 b=3 sq=8 sk=700 hq=8 hkv=2 d=128 dv=128 k=paged page=16 causal=1 cores=9",
        "dtype=bf16 b=7 few=4 sq=15 sk=600 hq=8 hkv=2 d=128 dv=128 k=paged page=16 csr=1 causal=1 q=packed lead=2 "
        "tail=3 "
        "cores=17",
        "dtype=bf16 b=2 sq=16 sk=900 hq=4 hkv=1 d=128 dv=128 cores=6",
        "dtype=bf16 b=2 sq=30 sk=500 hq=8 hkv=2 d=128 dv=128 k=paged page=16 causal=1 cores=18",
        // Trees: words of bits, some of which belong to the last or the first tile; more queries than keys.
        "dtype=bf16 b=3 sq=4 sk=700 hq=8 hkv=2 d=64 dv=64 k=paged page=16 tree=1 cores=7",
        "dtype=f16 b=2 sq=6 sk=900 hq=4 hkv=2 d=128 dv=128 tree=1 cores=5",
        "dtype=f16 b=4 sq=8 sk=600 hq=8 hkv=8 d=64 dv=64 tree=1 causal=1 used=1 cores=7",
        "dtype=f16 b=5 sq=40 sk=60 hq=2 hkv=2 d=64 dv=64 tree=2 causal=1 used=1 cores=3",
        "dtype=bf16 b=4 few=7 sq=40 sk=500 hq=2 hkv=2 d=64 dv=64 q=packed k=paged page=5 csr=1 tree=2 causal=1 cores=7",
        "dtype=bf16 b=3 sq=5 sk=500 hq=4 hkv=2 d=64 dv=64 k=paged page=32 tree=1 causal=1 softcap=8 alibi=h cores=5",
        // Causal flags: dense sequences, windows, top left, beside a tree and with parts of one size.
        "dtype=bf16 b=6 sq=4 sk=600 hq=4 hkv=2 d=64 dv=64 causal_seqs=1 cores=6",
        "dtype=bf16 b=6 sq=16 sk=300 hq=4 hkv=4 d=64 dv=64 causal_seqs=1 top_left=1 used=1 cores=6",
        "dtype=bf16 b=5 sq=4 sk=900 hq=4 hkv=1 d=64 dv=64 causal_seqs=1 wl=200 cores=5",
        "dtype=f16 b=5 few=3 sq=20 sk=900 hq=2 hkv=1 d=64 dv=64 q=packed k=paged page=16 tree=1 causal_seqs=1 "
        "invariant=1 cores=6"));

}  // namespace
}  // namespace tessera::cuda
