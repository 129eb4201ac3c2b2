// Offsets on a GPU beyond 2^31 elements.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "cuda_fixture.hpp"

namespace tessera::testing {
namespace {

constexpr int64_t kFar = (int64_t{1} << 31) + 4096;  // elements

// A call's tensors with `dim` of q, k, v, o and their gradients stretched until its last index is beyond 2^31 elements,
// all in one allocation, each tensor in the gaps of the others.
class Stretched {
 public:
  Stretched(const Call& call, int dim) : gpu_(Gpu::get()), compact_(call), problem_(call.problem) {
    const int64_t extent = call.q.layout().shape[dim];
    const int64_t stride = (kFar + extent - 2) / (extent - 1) / 64 * 64 + 64;
    int64_t offset = 0;
    for (const auto& [tensor, layout] : tensors()) {
      layout->strides[dim] = stride;
      offsets_.push_back(offset);
      // Only that dimension is stretched: the others are as compact as they were, and end within one of its steps.
      offset += tensor->size() + 64;
    }
    EXPECT_LT(offset, stride);
    memory_ = std::make_unique<GpuBlock>(2 * (stride * extent + offset), false);
  }

  const tessera_problem& problem() const { return problem_; }

  tessera_buffers buffers(tessera_buffers others) const {
    const auto at = [this](size_t n) { return memory_->data() + 2 * offsets_[n]; };
    others.q = at(0), others.k = at(1), others.v = at(2), others.o = at(3);
    if (offsets_.size() > 4) others.d_o = at(4), others.d_q = at(5), others.d_k = at(6), others.d_v = at(7);
    return others;
  }

  // Between the compact tensors and the stretched ones; of all that a direction reads or of what it writes.
  void upload(void* stream) {
    each_row([&](std::byte* host, std::byte* device, size_t bytes) { gpu_.upload(device, host, bytes, stream); });
  }
  // Element by element, as in the compact call.
  Bits download(void* stream) {
    Bits bits;
    each_row([&](std::byte*, std::byte* device, size_t bytes) {
      gpu_.download(bits.emplace_back(bytes).data(), device, bytes, stream);
    });
    return bits;
  }
  Bits compact_bits() {
    Bits bits;
    each_row([&](std::byte* host, std::byte*, size_t bytes) { bits.emplace_back(host, host + bytes); });
    return bits;
  }

 private:
  std::vector<std::pair<const Tensor*, tessera_layout*>> tensors() {
    tessera_problem& p = problem_;
    std::vector<std::pair<const Tensor*, tessera_layout*>> all = {
        {&compact_.q, &p.q}, {&compact_.k, &p.k}, {&compact_.v, &p.v}, {&compact_.o, &p.o}};
    if (compact_.d_o.present()) {
      all.insert(all.end(),
                 {{&compact_.d_o, &p.d_o}, {&compact_.d_q, &p.d_q}, {&compact_.d_k, &p.d_k}, {&compact_.d_v, &p.d_v}});
    }
    return all;
  }

  template <class F>
  void each_row(F f) {
    size_t n = 0;
    for (const auto& [tensor, layout] : tensors()) {
      const auto& shape = layout->shape;
      const auto& from = tensor->layout().strides;
      for (int64_t a = 0; a < shape[0]; ++a)
        for (int64_t b = 0; b < shape[1]; ++b)
          for (int64_t c = 0; c < shape[2]; ++c) {
            const int64_t host = a * from[0] + b * from[1] + c * from[2];
            const int64_t device = a * layout->strides[0] + b * layout->strides[1] + c * layout->strides[2];
            f(static_cast<std::byte*>(tensor->data()) + 2 * host, memory_->data() + 2 * (offsets_[n] + device),
              static_cast<size_t>(2 * shape[3]));
          }
      ++n;
    }
  }

  Gpu& gpu_;
  const Call& compact_;
  tessera_problem problem_;
  std::vector<int64_t> offsets_;
  std::unique_ptr<GpuBlock> memory_;
};

constexpr size_t kStretchedBytes = size_t{8} << 30;

class CudaFarOffsets : public Cuda, public ::testing::WithParamInterface<int> {};

// The compact call is right by the oracle, and the stretched one has its bits.
TEST_P(CudaFarOffsets, StretchedTensorsGiveTheBitsOfCompactOnes) {
  if (gpu_->free_bytes() < kStretchedBytes) GTEST_SKIP() << "skipped: less than 8 GiB of GPU memory are free";
  const Case c =
      *parse_case("dtype=bf16 backward=1 deterministic=1 b=3 sq=150 sk=150 hq=4 hkv=4 d=64 dv=64 causal=1", nullptr);
  for (const std::string& failure : check_case(c, {.places = {kGpu}, .check_oracle = false})) ADD_FAILURE() << failure;
  const Inputs in = make_inputs(c);
  Call call = make_call(in);
  for (const tessera_direction direction : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
    const RunResult compact = run(call, direction, {.place = kGpu});
    ASSERT_TRUE(compact.ok()) << compact.why();
  }
  Stretched far(call, GetParam());
  const Bits expected = far.compact_bits();
  for (Tensor* output : {&call.o, &call.lse, &call.d_q, &call.d_k, &call.d_v}) output->poison();
  Call rest = call;  // lse
  rest.problem = far.problem();
  far.upload(gpu_->stream());
  for (const tessera_direction direction : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
    const tessera_plan plan = plan_of(rest, direction);
    GpuCall on_gpu(call, direction, tessera_workspace_bytes(&plan), 0xFF);
    on_gpu.upload(gpu_->stream());
    const tessera_buffers buffers = far.buffers(on_gpu.buffers());
    const tessera_executor executor{.run = nullptr, .context = nullptr, .stream = gpu_->stream()};
    expect_ok((direction == TESSERA_FORWARD ? tessera_forward : tessera_backward)(
        &plan, &buffers, on_gpu.workspace(), tessera_workspace_bytes(&plan), &executor));
    gpu_->synchronize(gpu_->stream());
    if (direction == TESSERA_FORWARD) on_gpu.download(gpu_->stream());
  }
  EXPECT_EQ(far.download(gpu_->stream()) == expected, true);
}

INSTANTIATE_TEST_SUITE_P(Dim, CudaFarOffsets, ::testing::Values(0, 1, 2));

// More rows than 2^31 elements hold: every row a copy of one of the first 2^15, and so must its answer be.
TEST_F(Cuda, MoreThanTwoToThe31ElementsOfQueries) {
  constexpr int64_t kPeriod = int64_t{1} << 15, kDim = 64;
  constexpr int64_t kRows = kFar / kDim / kPeriod * kPeriod + kPeriod + 17;
  constexpr size_t kRowBytes = 2 * kDim;
  const Case few = *parse_case("dtype=bf16 b=1 sq=32768 sk=16 hq=1 hkv=1 d=64 dv=64", nullptr);
  if (gpu_->free_bytes() < 2 * kRows * kRowBytes + (size_t{1} << 30))
    GTEST_SKIP() << "skipped: less than 10 GiB of GPU memory are free";
  const Inputs in = make_inputs(few);
  Call call = make_call(in);
  const RunResult first = run(call, TESSERA_FORWARD, {.place = kGpu});
  ASSERT_TRUE(first.ok()) << first.why();
  // Copies: call's own are poisoned for the next call.
  const auto* const o_bytes = call.o.data_as<std::byte>();
  const auto* const lse_bytes = call.lse.data_as<std::byte>();
  const std::vector<std::byte> expected_o(o_bytes, o_bytes + kPeriod * kRowBytes);
  const std::vector<std::byte> expected_lse(lse_bytes, lse_bytes + kPeriod * sizeof(float));

  const GpuBlock q(kRows * kRowBytes, false), o(kRows * kRowBytes, false), lse(kRows * sizeof(float), false);
  void* const stream = gpu_->stream();
  gpu_->upload(q.data(), call.q.data(), kPeriod * kRowBytes, stream);
  for (int64_t row = kPeriod; row < kRows;) {
    const int64_t count = std::min(row, kRows - row);
    gpu_->copy(q.data() + row * kRowBytes, q.data(), count * kRowBytes, stream);
    row += count;
  }
  gpu_->fill(o.data(), 0xFF, kRows * kRowBytes, stream);
  gpu_->fill(lse.data(), 0xFF, kRows * sizeof(float), stream);

  Call many = call;
  for (tessera_layout* layout : {&many.problem.q, &many.problem.o}) {
    layout->shape[1] = kRows;
    layout->strides[0] = kRows * kDim;
  }
  many.problem.lse.shape[2] = many.problem.lse.strides[0] = many.problem.lse.strides[1] = kRows;
  const tessera_plan plan = plan_of(many, TESSERA_FORWARD);
  const GpuBlock workspace(tessera_workspace_bytes(&plan), false);
  GpuCall on_gpu(call, TESSERA_FORWARD, 0, 0xFF);
  on_gpu.upload(stream);
  tessera_buffers buffers = on_gpu.buffers();
  buffers.q = q.data();
  buffers.o = o.data();
  buffers.lse = reinterpret_cast<float*>(lse.data());
  const tessera_executor executor{.run = nullptr, .context = nullptr, .stream = stream};
  expect_ok(tessera_forward(&plan, &buffers, workspace.data(), tessera_workspace_bytes(&plan), &executor));
  gpu_->synchronize(stream);

  // The first, one across 2^31 elements, and the last rows.
  constexpr int64_t kCount = 4096, kBoundary = (int64_t{1} << 31) / kDim;
  for (const int64_t start : {int64_t{0}, kBoundary - kCount / 2, kRows - kCount}) {
    std::vector<std::byte> rows(kCount * kRowBytes), stats(kCount * sizeof(float));
    gpu_->download(rows.data(), o.data() + start * kRowBytes, rows.size(), stream);
    gpu_->download(stats.data(), lse.data() + start * sizeof(float), stats.size(), stream);
    int64_t wrong_o = 0, wrong_lse = 0;
    for (int64_t n = 0; n < kCount; ++n) {
      const int64_t twin = (start + n) % kPeriod;
      wrong_o += !std::equal(&rows[n * kRowBytes], &rows[n * kRowBytes] + kRowBytes, &expected_o[twin * kRowBytes]);
      wrong_lse += !std::equal(&stats[4 * n], &stats[4 * n] + 4, &expected_lse[4 * twin]);
    }
    EXPECT_EQ(wrong_o, 0) << "of " << kCount << " rows of o from " << start;
    EXPECT_EQ(wrong_lse, 0) << "of " << kCount << " rows of lse from " << start;
  }
}

}  // namespace
}  // namespace tessera::testing
