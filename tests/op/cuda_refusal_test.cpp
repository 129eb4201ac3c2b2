// Calls on a GPU that are refused: pointers of the wrong kind, memory of another GPU, indices out of range.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "cuda_fixture.hpp"

namespace tessera::testing {
namespace {

constexpr const char* kRefusalCase = "dtype=bf16 b=3 sq=20 sk=100 hq=4 hkv=2 d=64 dv=64 k=paged page=16";

// A call with one fault at a time is refused with a message that names the argument, and writes nothing; the corrected
// call still works.
class CudaRefusal : public Cuda {
 protected:
  explicit CudaRefusal(const char* text = kRefusalCase) : in_(inputs_of(text)) {}

  void SetUp() override {
    Cuda::SetUp();
    if (IsSkipped()) return;
    tessera_device device = gpu_device();
    device.check_indices = 1;
    plan_ = right_plan_ = plan_of(call_, TESSERA_FORWARD, device);
    on_gpu_ = std::make_unique<GpuCall>(call_, TESSERA_FORWARD, tessera_workspace_bytes(&plan_), 0xFF);
    on_gpu_->upload(gpu_->stream());
    buffers_ = on_gpu_->buffers();
    workspace_ = on_gpu_->workspace();
    workspace_bytes_ = tessera_workspace_bytes(&plan_);
  }

  tessera_status forward() {
    const tessera_executor executor{.stream = gpu_->stream()};
    return tessera_forward(&plan_, &buffers_, workspace_, workspace_bytes_, &executor);
  }

  void expect_pages_checked();

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

  const Inputs in_;
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
  tessera_device other = right_plan_.device;
  other.ordinal = 1;
  plan_ = plan_of(call_, TESSERA_FORWARD, other);
  const std::string message = forward().message;
  EXPECT_NE(message.find("is GPU 0's memory, must be GPU 1's, the call's device"), std::string::npos) << message;
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

// Spoils the first entry of the page table.
void CudaRefusal::expect_pages_checked() {
  std::vector<double> table = in_.page_table;
  for (const double page : {static_cast<double>(in_.pages), -1.0, 1e9}) {
    table[0] = page;
    Tensor spoilt(TESSERA_INT32, {in_.c.b, in_.max_pages});
    spoilt.store(table);
    gpu_->upload(on_gpu_->address(call_.page_table), spoilt.data(), table.size() * sizeof(int32_t), gpu_->stream());
    const tessera_status status = forward();
    EXPECT_EQ(status.code, TESSERA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(status.message).find("page_table[0, 0]"), 0u) << status.message;

    // Unchecked, it is read as the nearest valid page: no error, and no access to other memory.
    const tessera_plan unchecked = plan_of(call_, TESSERA_FORWARD);
    expect_ok(execute(unchecked, *on_gpu_, gpu_->stream()));
    gpu_->synchronize(gpu_->stream());
  }
  on_gpu_->upload(gpu_->stream());
  expect_ok(forward());
  gpu_->synchronize(gpu_->stream());
}

TEST_F(CudaRefusal, APageThatIsNotThere) { expect_pages_checked(); }

// Enough queries for Hopper's kernel.
class CudaRefusalOfManyQueries : public CudaRefusal {
 protected:
  CudaRefusalOfManyQueries() : CudaRefusal("dtype=bf16 b=3 sq=600 sk=100 hq=8 hkv=2 d=64 dv=64 k=paged page=16") {}
};

TEST_F(CudaRefusalOfManyQueries, APageThatIsNotThere) { expect_pages_checked(); }

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

}  // namespace
}  // namespace tessera::testing
