// A GPU's streams and graphs, threads without a context, and memory.
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_fixture.hpp"

namespace tessera::testing {
namespace {

class CudaLaunches : public Cuda {};
class CudaStreams : public Cuda, public ::testing::WithParamInterface<const char*> {};

// A captured call computes the current inputs on every replay.
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
      for (const auto& [to, from] :
           {std::pair(&call.o, &other.o), std::pair(&call.lse, &other.lse), std::pair(&call.lse_low, &other.lse_low)}) {
        if (!to->present()) continue;
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

// Consecutive calls on a stream differ in every part of a launch: kernels, their number, grids, addresses. There are
// more streams than a thread keeps graphs for, and enough calls on each that it launches graphs.
TEST_F(CudaLaunches, CallsInTurn) {
  std::vector<Direct> directs = run_directly();
  ASSERT_FALSE(HasFailure());
  std::vector<void*> streams = {nullptr, gpu_->stream()};
  while (streams.size() < 11) streams.push_back(gpu_->create_stream());
  // Each three times before the next, and then all alternately.
  const size_t calls = 4 * streams.size();
  for (size_t n = 0; n < calls; ++n) {
    void* const stream = streams[n < 3 * streams.size() ? n / 3 : n % streams.size()];
    std::vector<std::unique_ptr<GpuCall>> on_gpu;
    for (Direct& direct : directs) {
      const size_t workspace = tessera_workspace_bytes(&direct.plan);
      on_gpu.push_back(std::make_unique<GpuCall>(direct.call, direct.direction, workspace, 0xFF));
      on_gpu.back()->upload(stream);
    }
    for (size_t i = 0; i < directs.size(); ++i) expect_ok(execute(directs[i].plan, *on_gpu[i], stream));
    gpu_->synchronize(stream);
    for (size_t i = 0; i < directs.size(); ++i) {
      EXPECT_EQ(on_gpu[i]->download(stream), "");
      EXPECT_TRUE(output_bytes(directs[i].call, directs[i].direction) == directs[i].expected)
          << "call " << n << ", " << i;
    }
  }
  for (size_t n = 2; n < streams.size(); ++n) gpu_->destroy_stream(streams[n]);
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

// All memory is the caller's. A stream's first two calls of a form may take some: for the kernel's code, and for the
// graph.
TEST_P(CudaStreams, ACallTakesNoGpuMemory) {
  const Inputs in = inputs_of(GetParam());
  Call call = make_call(in);
  for (const tessera_direction direction : directions(in.c)) {
    const RunResult first = run(call, direction, {.place = kGpu});
    ASSERT_TRUE(first.ok()) << first.why();
    const tessera_plan plan = plan_of(call, direction);
    GpuCall on_gpu(call, direction, tessera_workspace_bytes(&plan), 0xFF);
    on_gpu.upload(gpu_->stream());
    for (int n = 0; n < 2; ++n) expect_ok(execute(plan, on_gpu, gpu_->stream()));
    gpu_->synchronize(gpu_->stream());
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
