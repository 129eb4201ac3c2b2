// The GPU's merge of partial results, kernels/tessera/combine, launched on the host (tests/emulated_gpu) on random
// parts and compared with the definition in float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/convert.hpp"
#include "cuda/kernels.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "tessera/combine/kernel.cuh"
#include "tessera/tensor.hpp"
#include "unit_launch.hpp"

namespace tessera::cuda {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// A merge of `parts` parts and, with chunks, the sequences' own, or the partial result that it accumulates to. Rows
// have a gap of `gap` elements after their columns.
struct Drawn {
  CombineConfig config;
  int parts, batch, rows, heads, dim, gap;
  bool sink, bounds;
  float shared, rest, sink_above;  // in all LSEs; in those of parts; how far sinks are above `shared`
  uint64_t seed;
};

class Merge {
 public:
  explicit Merge(const Drawn& of) : drawn_(of), random_(of.seed) {
    const int64_t row = of.dim + of.gap, rows = int64_t{of.batch} * of.rows * of.heads;
    draw(o_parts_, of.config.part_dtype, of.parts * rows * row), draw(own_o_, of.config.part_dtype, rows * row);
    o_.assign(static_cast<size_t>(rows * row) * bytes(of.config.dtype), std::byte{0x5a});
    // LSEs as two floats: a number common to all, and the rest.
    for (Lses* all : {&lse_parts_, &own_lse_})
      all->resize(static_cast<size_t>(all == &own_lse_ ? rows : of.parts * rows));
    lse_.assign(static_cast<size_t>(rows), 7.0f), lse_low_ = lse_, sink_.resize(static_cast<size_t>(of.heads));
    std::normal_distribution<double> normal(0, 3);
    for (Lses* all : {&lse_parts_, &own_lse_})
      for (size_t n = 0; n < all->rest.size(); ++n) all->set(n, of.shared, normal(random_) + of.rest);
    for (float& x : sink_) x = of.shared + static_cast<float>(normal(random_) + of.sink_above);
    // Parts that saw no key have uninitialised o.
    for (int64_t n = 0; n < static_cast<int64_t>(lse_parts_.rest.size()); ++n) {
      if (random_() % 3 > 0) continue;
      lse_parts_.rest[static_cast<size_t>(n)] = lse_parts_.high[static_cast<size_t>(n)] = kNone;
      lse_parts_.low[static_cast<size_t>(n)] = 0;
      for (int d = 0; d < of.dim; ++d) store(o_parts_, of.config.part_dtype, n * row + d, std::nan(""));
    }
    bounds_[0] = static_cast<int32_t>(random_() % static_cast<unsigned>(of.batch * of.rows + 1));
    bounds_[1] = of.batch * of.rows - static_cast<int32_t>(random_() % 3);

    CombineParams& p = params;
    p.parts = of.parts, p.batch = of.batch, p.rows = Divisor(of.rows), p.heads = Divisor(of.heads),
    p.head_dim_v = of.dim;
    // [part, batch, row, head]; chunks have the heads of a KV head side by side, two of them.
    p.o_parts = o_parts_.data(), p.o_part = rows * row, p.o_part_batch = int64_t{of.rows} * of.heads * row;
    p.o_part_row = of.heads * row, p.o_part_head = row;
    const int64_t batch_lses = int64_t{of.rows} * of.heads;
    p.lse_parts = {lse_parts_.high.data(), rows, batch_lses, of.config.chunks ? 2 : 1, of.heads};
    p.lse_low_parts = p.lse_parts, p.lse_low_parts.data = lse_parts_.low.data();
    if (of.config.chunks) {
      p.o_part_head = 2 * row;
      p.chunks = {Divisor(2),
                  row,
                  1,
                  own_o_.data(),
                  p.o_part_batch,
                  p.o_part_row,
                  row,
                  {own_lse_.high.data(), batch_lses, 1, of.heads},
                  {own_lse_.low.data(), batch_lses, 1, of.heads}};
    }
    p.o = {o_.data(), p.o_part_batch, p.o_part_row, row};
    p.lse = {lse_.data(), batch_lses, of.rows, 1}, p.lse_low = p.lse, p.lse_low.data = lse_low_.data();
    if (of.config.accumulate) {
      p.chunks.own_o = own_o_.data(), p.chunks.own_o_batch = p.o_part_batch;
      p.chunks.own_o_row = p.o_part_row, p.chunks.own_o_head = row;
      for (int64_t r = 0; r < rows; ++r) {
        const auto n = static_cast<size_t>(r), at = static_cast<size_t>(lse_index(r));
        if (random_() % 4 == 0) {  // nothing yet
          own_lse_.rest[n] = own_lse_.high[n] = kNone, own_lse_.low[n] = 0;
          for (int d = 0; d < of.dim; ++d) store(own_o_, of.config.part_dtype, r * row + d, std::nan(""));
        }
        lse_[at] = own_lse_.high[n], lse_low_[at] = own_lse_.low[n];
      }
    }
    if (of.bounds) p.rows_begin = &bounds_[0], p.rows_end = &bounds_[1];
    if (of.sink) p.sink = sink_.data(), p.sink_head = 1;
  }

  void expect_merged() const {
    const Drawn& of = drawn_;
    const double unit = of.config.dtype == Dtype::kFloat32   ? 0x1p-20
                        : of.config.dtype == Dtype::kFloat16 ? 0x1p-10
                                                             : 0x1p-7;
    const int64_t row = of.dim + of.gap, rows = int64_t{of.batch} * of.rows * of.heads;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t of_all = r / of.heads;
      const bool there = !of.bounds || (of_all >= bounds_[0] && of_all < bounds_[1]);
      std::vector<std::pair<double, int64_t>>
          parts;  // LSE without the common number, and the place of o: own parts follow the others
      for (int64_t n = 0; there && n < of.parts; ++n)
        parts.emplace_back(lse_parts_.rest[static_cast<size_t>(n * rows + r)], n * rows + r);
      if (of.config.chunks || of.config.accumulate) parts.emplace_back(own_lse_.rest[static_cast<size_t>(r)], -1 - r);
      double sum = 0;
      for (const auto& [lse, at] : parts) sum += std::exp(lse);
      const bool seen = sum > 0;
      if (seen && of.sink) sum += std::exp(double{sink_[static_cast<size_t>(r % of.heads)]} - of.shared);
      const auto at_row = static_cast<size_t>(lse_index(r));
      if (seen) {
        ASSERT_NEAR((double{lse_[at_row]} - of.shared) + lse_low_[at_row], std::log(sum), 1e-5) << "row " << r;
        ASSERT_EQ(lse_[at_row] + lse_low_[at_row], lse_[at_row]) << "row " << r;
      } else {
        ASSERT_EQ(lse_[at_row], kNone) << "row " << r;
        ASSERT_EQ(lse_low_[at_row], 0.0f) << "row " << r;
      }
      for (int64_t d = 0; d < of.dim; ++d) {
        double o = 0, most = 0;
        for (const auto& [lse_n, at] : parts) {
          if (lse_n == kNone) continue;
          const double x = at < 0 ? load(own_o_, of.config.part_dtype, (-1 - at) * row + d)
                                  : load(o_parts_, of.config.part_dtype, at * row + d);
          o += std::exp(lse_n) / sum * x, most = std::max(most, std::fabs(x));
        }
        ASSERT_NEAR(load(o_, of.config.dtype, r * row + d), o, unit * std::fabs(o) + 0x1p-20 * most)
            << "row " << r << ", column " << d;
      }
      for (int64_t d = of.dim; d < row; ++d) {
        for (int64_t byte = 0; byte < bytes(of.config.dtype); ++byte)
          ASSERT_EQ(o_[static_cast<size_t>((r * row + d) * bytes(of.config.dtype) + byte)], std::byte{0x5a});
      }
    }
  }

  CombineParams params{};

 private:
  struct Lses {
    std::vector<double> rest;
    std::vector<float> high, low;
    void resize(size_t count) { rest.resize(count), high.resize(count), low.resize(count); }
    void set(size_t n, float shared, double x) {  // like a part whose sum is a float
      const TwoFloats lse = two_sum(shared, static_cast<float>(x));
      rest[n] = static_cast<float>(x), high[n] = lse.high, low[n] = lse.low;
    }
  };
  static int64_t bytes(Dtype dtype) { return dtype_bytes(dtype); }
  static double load(const std::vector<std::byte>& from, Dtype dtype, int64_t at) {
    return core::load(static_cast<int32_t>(dtype), from.data(), at);
  }
  static void store(std::vector<std::byte>& to, Dtype dtype, int64_t at, double x) {
    core::store(static_cast<int32_t>(dtype), to.data(), at, x);
  }
  void draw(std::vector<std::byte>& to, Dtype dtype, int64_t count) {
    to.resize(static_cast<size_t>(count * bytes(dtype)));
    std::normal_distribution<double> normal;
    for (int64_t n = 0; n < count; ++n) store(to, dtype, n, normal(random_));
  }
  // [batch, head, row]; heads are a row apart.
  int64_t lse_index(int64_t r) const {
    const int64_t head = r % drawn_.heads, row = r / drawn_.heads % drawn_.rows, batch = r / drawn_.heads / drawn_.rows;
    return params.lse.batch * batch + params.lse.head * head + params.lse.row * row;
  }

  const Drawn drawn_;
  std::mt19937_64 random_;
  std::vector<std::byte> o_parts_, own_o_, o_;
  Lses lse_parts_, own_lse_;
  std::vector<float> lse_, lse_low_, sink_;
  int32_t bounds_[2];
};

template <CombineConfig kConfig>
void expect_right(uint64_t seed, int& aligned) {
  std::mt19937_64 random(seed);
  const auto between = [&random](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  const bool wide = random() % 2 == 0;  // columns by fours
  const Drawn drawn{.config = kConfig,
                    .parts = between(0, 9) == 0 ? between(30, 70) : between(1, 20),
                    .batch = between(1, 3),
                    .rows = between(1, 4),
                    .heads = 2 * between(1, 3),
                    .dim = wide ? 4 * between(1, 50) : between(1, 150),
                    .gap = wide ? 4 * between(0, 2) : between(0, 3),
                    .sink = random() % 2 == 0,
                    .bounds = random() % 2 == 0,
                    .shared = std::array{0.0f, 0.0f, 3000.0f, -1e9f, -1e30f, 3.2e38f}[random() % 6],
                    .rest = std::array{0.0f, 0.0f, 200.0f}[random() % 3],
                    .sink_above = std::array{0.0f, -60.0f, 60.0f}[random() % 3],
                    .seed = seed};
  SCOPED_TRACE("seed " + std::to_string(seed) + ": " + std::to_string(drawn.parts) + " parts of " +
               std::to_string(drawn.dim));
  Merge merge(drawn);
  merge.params.by_block = combines_by_block(kConfig) && random() % 2 == 0;
  LaunchList list;
  const tessera_status listed = launch_combine(kConfig, merge.params, list);
  ASSERT_EQ(listed.code, TESSERA_OK) << listed.message;
  ASSERT_EQ(list.size(), 1);
  CombineParams params;
  std::memcpy(static_cast<void*>(&params), list[0].params, sizeof params);
  aligned += params.aligned;
  const int ran = emulated::run_blocks({list[0].grid.x, 1, 1}, list[0].spec().threads, list[0].spec().smem_bytes,
                                       [&] { combine<kConfig>(params); });
  ASSERT_EQ(ran, 0);
  merge.expect_merged();
}

TEST(CombineBlock, MergesDrawnParts) {
  int aligned = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    expect_right<CombineConfig{Dtype::kBFloat16, Dtype::kBFloat16, true}>(seed, aligned);
    expect_right<CombineConfig{Dtype::kFloat16, Dtype::kFloat32, false}>(seed, aligned);
    expect_right<CombineConfig{Dtype::kFloat32, Dtype::kFloat32, false}>(seed, aligned);
    expect_right<CombineConfig{Dtype::kBFloat16, Dtype::kFloat32, false, true}>(seed, aligned);
    if (::testing::Test::HasFatalFailure()) return;
  }
  EXPECT_GT(aligned, 30);
  EXPECT_LT(aligned, 130);
}

}  // namespace
}  // namespace tessera::cuda
