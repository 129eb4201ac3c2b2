// Two GPUs of one kind in one process: each call runs on its plan's, whichever context is current.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda_fixture.hpp"

namespace tessera::testing {
namespace {

// Skipped, with the reason, without two GPUs of one kind.
class CudaDevices : public Cuda {
 protected:
  void SetUp() override {
    Cuda::SetUp();
    if (IsSkipped()) return;
    const tessera_status status = tessera_device_cuda(1, &devices_[1]);
    if (status.code != TESSERA_OK) GTEST_SKIP() << "skipped: " << status.message;
    devices_[0] = gpu_device();
    if (std::strcmp(devices_[0].name, devices_[1].name) != 0) {
      GTEST_SKIP() << "skipped: a " << devices_[0].name << " and a " << devices_[1].name << ", whose plans differ";
    }
    gpus_[0] = gpu_, gpus_[1] = &Gpu::second();
  }

  // A call in a GPU's memory, with that GPU's plan.
  std::unique_ptr<GpuCall> on(int gpu, Direct& direct, tessera_plan& plan, void* stream) {
    plan = plan_of(direct.call, direct.direction, devices_[gpu]);
    const size_t workspace = tessera_workspace_bytes(&plan);
    auto call = std::make_unique<GpuCall>(direct.call, direct.direction, workspace, 0xFF, *gpus_[gpu]);
    call->upload(stream);
    return call;
  }

  void expect_result(int gpu, Direct& direct, GpuCall& call, void* stream) {
    gpus_[gpu]->synchronize(stream);
    EXPECT_EQ(call.download(stream), "");
    EXPECT_TRUE(output_bytes(direct.call, direct.direction) == direct.expected) << "GPU " << gpu;
  }

  tessera_device devices_[2];
  Gpu* gpus_[2] = {};
};

// By one thread, on the default stream and on others, with the first GPU's context current all the while: often enough
// for each GPU to have graphs of its own.
TEST_F(CudaDevices, TakeCallsInTurn) {
  std::vector<Direct> directs = run_directly();
  ASSERT_FALSE(HasFailure());
  for (const bool by_default : {false, true}) {
    for (Direct& direct : directs) {
      void* streams[2];
      tessera_plan plans[2];
      std::unique_ptr<GpuCall> calls[2];
      for (int gpu : {0, 1}) {
        streams[gpu] = by_default ? nullptr : gpus_[gpu]->stream();
        calls[gpu] = on(gpu, direct, plans[gpu], streams[gpu]);
      }
      for (int round = 0; round < 3; ++round) {
        for (int gpu : {0, 1}) {
          expect_ok(execute(plans[gpu], *calls[gpu], streams[gpu]));
          EXPECT_EQ(Gpu::current(), gpus_[0]->context());
        }
      }
      for (int gpu : {1, 0}) expect_result(gpu, direct, *calls[gpu], streams[gpu]);
    }
  }
}

// By a thread for each GPU, which have no context.
TEST_F(CudaDevices, TakeCallsFromThreads) {
  std::vector<Direct> directs = run_directly();
  ASSERT_FALSE(HasFailure());
  for (Direct& direct : directs) {
    tessera_plan plans[2];
    std::unique_ptr<GpuCall> calls[2];
    for (int gpu : {0, 1}) calls[gpu] = on(gpu, direct, plans[gpu], gpus_[gpu]->stream());
    std::vector<std::thread> threads;
    for (int gpu : {0, 1}) {
      threads.emplace_back([&, gpu] {
        for (int round = 0; round < 20; ++round) expect_ok(execute(plans[gpu], *calls[gpu], gpus_[gpu]->stream()));
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (int gpu : {0, 1}) expect_result(gpu, direct, *calls[gpu], gpus_[gpu]->stream());
  }
}

TEST_F(CudaDevices, AGraphOfTheSecond) {
  std::vector<Direct> directs = run_directly();
  ASSERT_FALSE(HasFailure());
  void* const stream = gpus_[1]->stream();
  for (Direct& direct : directs) {
    tessera_plan plan;
    const std::unique_ptr<GpuCall> call = on(1, direct, plan, stream);
    tessera_status status{};
    void* const graph = gpus_[1]->capture(stream, [&] { status = execute(plan, *call, stream); });
    expect_ok(status);
    for (int replay = 0; replay < 2; ++replay) {
      gpus_[1]->launch_graph(graph, stream);
      expect_result(1, direct, *call, stream);
    }
    gpus_[1]->destroy_graph(graph);
  }
}

// Nothing is launched then, and both GPUs still work.
TEST_F(CudaDevices, RefuseEachOthersMemoryAndStreams) {
  std::vector<Direct> directs = run_directly();
  ASSERT_FALSE(HasFailure());
  Direct& direct = directs.front();
  for (int gpu : {0, 1}) {
    const int other = 1 - gpu;
    tessera_plan plan;
    const std::unique_ptr<GpuCall> call = on(gpu, direct, plan, gpus_[gpu]->stream());
    const auto refusal = [&](void* stream) {
      const tessera_status status = execute(plan, *call, stream);
      EXPECT_EQ(status.code, TESSERA_INVALID_ARGUMENT);
      return std::string(status.message);
    };
    EXPECT_EQ(refusal(gpus_[other]->stream()), "executor.stream: belongs to GPU " + std::to_string(other) +
                                                   ", must be the plan's, GPU " + std::to_string(gpu));
    const tessera_plan own = plan;
    plan = plan_of(direct.call, direct.direction, devices_[other]);
    const std::string message = refusal(gpus_[other]->stream());
    EXPECT_NE(message.find("is GPU " + std::to_string(gpu) + "'s memory, must be GPU " + std::to_string(other) + "'s"),
              std::string::npos)
        << message;
    gpus_[gpu]->synchronize(gpus_[gpu]->stream());
    call->download(gpus_[gpu]->stream());
    EXPECT_FALSE(output_bytes(direct.call, direct.direction) == direct.expected) << "it ran";
    plan = own;
    expect_ok(execute(plan, *call, gpus_[gpu]->stream()));
    expect_result(gpu, direct, *call, gpus_[gpu]->stream());
  }
}

}  // namespace
}  // namespace tessera::testing
