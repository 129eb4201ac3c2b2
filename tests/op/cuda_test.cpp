// What only a GPU can get wrong: pointers of the wrong kind, offsets beyond 2^31 elements, streams, graphs.
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "execute.hpp"
#include "gpu_call.hpp"

namespace tessera::testing {
namespace {

using Bits = std::vector<std::vector<std::byte>>;

Inputs inputs_of(const char* text) { return make_inputs(legalised(*parse_case(text, nullptr))); }

tessera_plan plan_of(const Call& call, tessera_direction direction, bool check_indices = false) {
  tessera_device device = gpu_device();
  device.check_indices = check_indices;
  const tessera_problem problem = problem_of(call, direction);
  tessera_plan plan{};
  const tessera_status status = tessera_make_plan(&problem, &device, &plan);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message;
  return plan;
}

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
    gpu_ = &Gpu::get();
  }
  void expect_ok(const tessera_status& status) { EXPECT_EQ(status.code, TESSERA_OK) << status.message; }

  Gpu* gpu_ = nullptr;
};

// ---- what is refused ------------------------------------------------------------------------------------------------

TEST(CudaPlan, RefusesFloat64WithAReason) {
  const Call call = make_oracle_call(inputs_of("sq=16 sk=16 d=16 dv=16"));
  const tessera_device device = imagined_gpu(90);
  const tessera_problem problem = problem_of(call, TESSERA_FORWARD);
  tessera_plan plan;
  const tessera_status status = tessera_make_plan(&problem, &device, &plan);
  EXPECT_EQ(status.code, TESSERA_UNSUPPORTED) << status.message;
  EXPECT_NE(std::string(status.message).find("float64"), std::string::npos) << status.message;
}

TEST(CudaPlan, RefusesAnArchitectureThatNoKernelIsFor) {
  const Call call = make_call(inputs_of("sq=16 sk=16 d=16 dv=16"));
  const tessera_problem problem = problem_of(call, TESSERA_FORWARD);
  for (const int32_t arch : {70, 75, 130}) {
    const tessera_device device = imagined_gpu(arch);
    tessera_plan plan;
    const tessera_status status = tessera_make_plan(&problem, &device, &plan);
    EXPECT_EQ(status.code, TESSERA_INVALID_ARGUMENT);
    EXPECT_EQ(status.message, "device.arch: " + std::to_string(arch) + ", accepted 80 .. 129");
  }
}

TEST(CudaPlan, RefusesAHeadSizeBeyondTheLimit) {
  Call call = make_call(inputs_of("sq=16 sk=16 d=512 dv=512"));
  tessera_problem problem = problem_of(call, TESSERA_FORWARD);
  problem.q.shape[3] = problem.k.shape[3] = 513;
  const tessera_device device = imagined_gpu(90);
  tessera_plan plan;
  const tessera_status status = tessera_make_plan(&problem, &device, &plan);
  EXPECT_EQ(status.code, TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(status.message).find("q: "), 0u) << status.message;
  EXPECT_NE(std::string(status.message).find("D in 1 .. 512"), std::string::npos) << status.message;
}

// Every feature, at every head size, on every architecture: also those with the least shared memory.
TEST(CudaPlan, TakesEveryCaseOfTheTable) {
  for (const Case& c : case_table()) {
    const Call call = make_call(make_inputs(c));
    for (const int32_t arch : {80, 86, 90, 100, 120}) {
      for (const tessera_direction direction : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
        if (direction == TESSERA_BACKWARD && !c.backward) continue;
        const tessera_device device = imagined_gpu(arch);
        const tessera_problem problem = problem_of(call, direction);
        tessera_plan plan;
        const tessera_status status = tessera_make_plan(&problem, &device, &plan);
        EXPECT_EQ(status.code, TESSERA_OK) << "sm_" << arch << ": " << status.message << "\n  " << to_text(c);
      }
    }
  }
}

constexpr const char* kRefusalCase = "dtype=bf16 b=3 sq=20 sk=100 hq=4 hkv=2 d=64 dv=64 k=paged page=16";

// A call that is spoilt in one way at a time: refused in words that name the argument, nothing written; and the same
// call, put right, still works.
class CudaRefusal : public Cuda {
 protected:
  void SetUp() override {
    Cuda::SetUp();
    if (IsSkipped()) return;
    plan_ = right_plan_ = plan_of(call_, TESSERA_FORWARD, true);
    on_gpu_ = std::make_unique<GpuCall>(call_, TESSERA_FORWARD, tessera_workspace_bytes(&plan_), 0xFF);
    on_gpu_->upload(gpu_->stream());
    buffers_ = on_gpu_->buffers();
    workspace_ = on_gpu_->workspace();
    workspace_bytes_ = tessera_workspace_bytes(&plan_);
  }

  tessera_status forward() {
    const tessera_executor executor{.run = nullptr, .context = nullptr, .stream = gpu_->stream()};
    return tessera_forward(&plan_, &buffers_, workspace_, workspace_bytes_, &executor);
  }

  void expect_refused(const std::string& name) {
    const tessera_status status = forward();
    EXPECT_EQ(status.code, TESSERA_INVALID_ARGUMENT) << status.message;
    EXPECT_EQ(std::string(status.message).find(name), 0u) << status.message;
    gpu_->synchronize(gpu_->stream());
    EXPECT_EQ(on_gpu_->download(gpu_->stream()), "");
    for (const char untouched : call_.o.untouched()) EXPECT_TRUE(untouched) << "written in spite of the refusal";

    on_gpu_->upload(gpu_->stream());
    plan_ = right_plan_;
    buffers_ = on_gpu_->buffers();
    workspace_ = on_gpu_->workspace();
    workspace_bytes_ = tessera_workspace_bytes(&plan_);
    expect_ok(forward());
    gpu_->synchronize(gpu_->stream());
    on_gpu_->upload(gpu_->stream());  // poison again
  }

  const Inputs in_ = inputs_of(kRefusalCase);
  Call call_ = make_call(in_);
  tessera_plan plan_{}, right_plan_{};
  std::unique_ptr<GpuCall> on_gpu_;
  tessera_buffers buffers_{};
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
};

TEST_F(CudaRefusal, AHostPointer) {
  buffers_.k = call_.k.data();
  expect_refused("k");
  buffers_.o = call_.o.data();
  expect_refused("o");
  buffers_.page_table = call_.page_table.data_as<int32_t>();
  expect_refused("page_table");
}

TEST_F(CudaRefusal, AHostWorkspace) {
  std::vector<std::byte> host(workspace_bytes_);
  workspace_ = host.data();
  expect_refused("workspace");
}

TEST_F(CudaRefusal, AFreedPointer) {
  constexpr size_t kBytes = size_t{64} << 20;  // so large that it has pages of its own
  std::byte* const freed = gpu_->allocate(kBytes);
  gpu_->release(freed);
  buffers_.v = freed;
  expect_refused("v");
}

// One GPU is enough for that: the plan is another's.
TEST_F(CudaRefusal, MemoryOfAnotherGpu) {
  plan_.device.ordinal = 1;
  const std::string message = forward().message;
  EXPECT_NE(message.find("is GPU 0's memory, must be GPU 1's, the plan's device"), std::string::npos) << message;
  expect_refused("q");
}

TEST_F(CudaRefusal, AMisalignedPointer) {
  buffers_.q = static_cast<const std::byte*>(buffers_.q) + 1;
  expect_refused("q");
  buffers_.lse = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(buffers_.lse) + 2);
  expect_refused("lse");
}

TEST_F(CudaRefusal, ANullPointer) {
  buffers_.v = nullptr;
  expect_refused("v");
}

TEST_F(CudaRefusal, AWorkspaceTooSmall) {
  ASSERT_GT(workspace_bytes_, 0u);
  --workspace_bytes_;
  expect_refused("workspace");
}

TEST_F(CudaRefusal, APageThatIsNotThere) {
  std::vector<double> table = in_.page_table;
  for (const double page : {static_cast<double>(in_.pages), -1.0, 1e9}) {
    table[0] = page;
    Tensor spoilt(TESSERA_INT32, {in_.c.b, in_.max_pages});
    spoilt.store(table);
    gpu_->upload(on_gpu_->address(call_.page_table), spoilt.data(), table.size() * sizeof(int32_t), gpu_->stream());
    const tessera_status status = forward();
    EXPECT_EQ(status.code, TESSERA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(status.message).find("page_table[0, 0]"), 0u) << status.message;

    // Unchecked, it is read as the nearest page that is there: no error, and no memory of others.
    tessera_plan unchecked = plan_;
    unchecked.device.check_indices = 0;
    expect_ok(execute(unchecked, *on_gpu_, gpu_->stream()));
    gpu_->synchronize(gpu_->stream());
  }
  on_gpu_->upload(gpu_->stream());
  expect_ok(forward());
  gpu_->synchronize(gpu_->stream());
}

// More keys in use than a sequence has pages for, and fewer than none.
TEST_F(CudaRefusal, ALengthThatIsNotThere) {
  std::vector<int32_t> lengths(static_cast<size_t>(in_.c.b));
  for (const int64_t wrong : {in_.max_pages * in_.c.page + 1, int64_t{-1}}) {
    lengths.back() = static_cast<int32_t>(wrong);
    gpu_->upload(on_gpu_->address(call_.seqused_k), lengths.data(), lengths.size() * sizeof lengths[0], gpu_->stream());
    const tessera_status status = forward();
    EXPECT_EQ(status.code, TESSERA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(status.message).find("seqused_k[2]: " + std::to_string(wrong)), 0u) << status.message;
  }
  on_gpu_->upload(gpu_->stream());
  expect_ok(forward());
  gpu_->synchronize(gpu_->stream());
}

TEST_F(CudaRefusal, AGpuThatIsNotThere) {
  tessera_device device;
  const tessera_status status = tessera_device_cuda(1000, &device);
  EXPECT_EQ(status.code, TESSERA_UNSUPPORTED);
  EXPECT_NE(std::string(status.message).find("1000"), std::string::npos) << status.message;
}

// ---- 64-bit offsets -------------------------------------------------------------------------------------------------

constexpr int64_t kFar = (int64_t{1} << 31) + 4096;  // elements

// A call's tensors with `dim` of q, k, v, o and their gradients stretched until its last index lies beyond 2^31
// elements, all in one allocation, one tensor behind the other within the gaps.
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
  // Element by element as the compact call has them.
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

// ---- streams, graphs, threads, memory -------------------------------------------------------------------------------

constexpr const char* kStreamCases[] = {
    "dtype=bf16 backward=1 deterministic=1 b=2 sq=300 sk=400 hq=4 hkv=2 d=64 dv=64 causal=1",
    "dtype=f32 backward=1 deterministic=1 b=2 sq=70 sk=140 hq=4 hkv=2 d=32 dv=40 bias=hqk d_bias=1 sink=1 d_sink=1",
    "dtype=f16 b=2 sq=1 sk=4001 hq=8 hkv=2 d=128 dv=128",
};

std::vector<tessera_direction> directions(const Case& c) {
  if (c.backward) return {TESSERA_FORWARD, TESSERA_BACKWARD};
  return {TESSERA_FORWARD};
}

class CudaStreams : public Cuda, public ::testing::WithParamInterface<const char*> {};

// A captured call does on every replay what the call would do then: other inputs give their own answer.
TEST_P(CudaStreams, AGraphReplaysTheCall) {
  const Inputs in = inputs_of(GetParam());
  Case other_case = in.c;
  other_case.seed += 1000;
  const Inputs others = make_inputs(other_case);
  Call call = make_call(in), other = make_call(others);
  void* const stream = gpu_->stream();
  for (const tessera_direction direction : directions(in.c)) {
    const RunResult direct = run(call, direction, {.place = kGpu}),
                    direct_other = run(other, direction, {.place = kGpu});
    ASSERT_TRUE(direct.ok() && direct_other.ok()) << direct.why() << direct_other.why();
    const Bits expected = output_bytes(call, direction), expected_other = output_bytes(other, direction);
    ASSERT_FALSE(expected == expected_other);

    const tessera_plan plan = plan_of(call, direction);
    GpuCall on_gpu(call, direction, tessera_workspace_bytes(&plan), 0xFF);
    on_gpu.upload(stream);
    tessera_status status{};
    void* const graph = gpu_->capture(stream, [&] { status = execute(plan, on_gpu, stream); });
    expect_ok(status);
    // Nothing has run yet.
    EXPECT_EQ(on_gpu.download(stream), "");
    EXPECT_TRUE(call.o.untouched().empty() || direction == TESSERA_BACKWARD || call.o.untouched()[0]);
    for (int replay = 0; replay < 3; ++replay) {
      gpu_->launch_graph(graph, stream);
      gpu_->synchronize(stream);
      EXPECT_EQ(on_gpu.download(stream), "");
      EXPECT_TRUE(output_bytes(call, direction) == expected) << "replay " << replay;
    }
    // The same memory, other values.
    const auto replaced = other.inputs(), places = call.inputs();
    for (size_t n = 0; n < replaced.size(); ++n) {
      if (!replaced[n]->present()) continue;
      std::byte* const start = on_gpu.address(*places[n]) - (places[n]->data_as<std::byte>() - places[n]->storage());
      gpu_->upload(start, replaced[n]->storage(), replaced[n]->storage_bytes(), stream);
    }
    if (direction == TESSERA_BACKWARD) {
      for (const auto& [to, from] : {std::pair(&call.o, &other.o), std::pair(&call.lse, &other.lse)}) {
        std::byte* const start = on_gpu.address(*to) - (to->data_as<std::byte>() - to->storage());
        gpu_->upload(start, from->storage(), from->storage_bytes(), stream);
      }
    }
    gpu_->launch_graph(graph, stream);
    gpu_->synchronize(stream);
    on_gpu.download(stream);  // inputs differ from the call's, on purpose
    EXPECT_TRUE(output_bytes(call, direction) == expected_other) << "with other inputs";
    gpu_->destroy_graph(graph);
    const RunResult again = run(call, direction, {.place = kGpu});
    ASSERT_TRUE(again.ok()) << again.why();
  }
}

// Calls on two streams do not disturb each other.
TEST_P(CudaStreams, TwoStreamsAtOnce) {
  const Inputs in = inputs_of(GetParam());
  Case other_case = in.c;
  other_case.seed += 1000;
  const Inputs others = make_inputs(other_case);
  Call calls[2] = {make_call(in), make_call(others)};
  void* const streams[2] = {gpu_->create_stream(), gpu_->create_stream()};
  for (const tessera_direction direction : directions(in.c)) {
    Bits expected[2];
    std::unique_ptr<GpuCall> on_gpu[2];
    const tessera_plan plan = plan_of(calls[0], direction);
    for (int n : {0, 1}) {
      const RunResult alone = run(calls[n], direction, {.place = kGpu});
      ASSERT_TRUE(alone.ok()) << alone.why();
      expected[n] = output_bytes(calls[n], direction);
    }
    for (int n : {0, 1}) {
      on_gpu[n] = std::make_unique<GpuCall>(calls[n], direction, tessera_workspace_bytes(&plan), 0xFF);
      on_gpu[n]->upload(streams[n]);
    }
    constexpr int kRounds = 20;
    for (int round = 0; round < kRounds; ++round)
      for (int n : {0, 1}) expect_ok(execute(plan, *on_gpu[n], streams[n]));
    for (int n : {0, 1}) {
      gpu_->synchronize(streams[n]);
      EXPECT_EQ(on_gpu[n]->download(streams[n]), "");
      EXPECT_TRUE(output_bytes(calls[n], direction) == expected[n]) << "stream " << n;
    }
  }
  for (void* const stream : streams) gpu_->destroy_stream(stream);
}

// A thread that has not used CUDA before, and has no context.
TEST_P(CudaStreams, AThreadOfItsOwn) {
  const Inputs in = inputs_of(GetParam());
  Call call = make_call(in);
  for (const tessera_direction direction : directions(in.c)) {
    const RunResult here = run(call, direction, {.place = kGpu});
    ASSERT_TRUE(here.ok()) << here.why();
    const Bits expected = output_bytes(call, direction);
    const tessera_plan plan = plan_of(call, direction);
    GpuCall on_gpu(call, direction, tessera_workspace_bytes(&plan), 0xFF);
    on_gpu.upload(gpu_->stream());
    tessera_status status{};
    std::thread([&] { status = execute(plan, on_gpu, gpu_->stream()); }).join();
    expect_ok(status);
    gpu_->synchronize(gpu_->stream());
    EXPECT_EQ(on_gpu.download(gpu_->stream()), "");
    EXPECT_TRUE(output_bytes(call, direction) == expected);
  }
}

// All memory is the caller's.
TEST_P(CudaStreams, ACallTakesNoGpuMemory) {
  const Inputs in = inputs_of(GetParam());
  Call call = make_call(in);
  for (const tessera_direction direction : directions(in.c)) {
    const RunResult first = run(call, direction, {.place = kGpu});
    ASSERT_TRUE(first.ok()) << first.why();
    const tessera_plan plan = plan_of(call, direction);
    GpuCall on_gpu(call, direction, tessera_workspace_bytes(&plan), 0xFF);
    on_gpu.upload(gpu_->stream());
    const size_t before = gpu_->free_bytes();
    for (int n = 0; n < 10; ++n) expect_ok(execute(plan, on_gpu, gpu_->stream()));
    gpu_->synchronize(gpu_->stream());
    EXPECT_EQ(gpu_->free_bytes(), before);
    on_gpu.download(gpu_->stream());
  }
}

INSTANTIATE_TEST_SUITE_P(Case, CudaStreams, ::testing::ValuesIn(kStreamCases));

}  // namespace
}  // namespace tessera::testing
