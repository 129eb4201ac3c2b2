// tessera_append on a GPU: random steps against the definition, each tensor in an allocation of its exact size, as
// compute-sanitizer needs it.
#include <memory>
#include <string>
#include <vector>

#include "cuda_fixture.hpp"
#include "unit/append_step.hpp"

namespace tessera::testing {
namespace {

// A step's tensors in the GPU's memory; outputs are copied back.
class AppendOnGpu {
 public:
  AppendOnGpu(const tessera_append_call& call, void* stream) : call_(call), stream_(stream) {
    for (tessera_tensor* const tensor : {&call_.k, &call_.v, &call_.k_cache, &call_.v_cache, &call_.q, &call_.q_out,
                                         &call_.cos, &call_.sin, &call_.seqused_k, &call_.cu_seqlens, &call_.page_table,
                                         &call_.positions_q, &call_.positions_k, &call_.k_descale, &call_.v_descale}) {
      if (tensor->layout.rank == 0) continue;
      const size_t bytes = test::span_elements(tensor->layout) * tessera_dtype_bytes(tensor->layout.dtype);
      moved_.push_back({tensor->data, bytes, std::make_unique<GpuBlock>(std::max<size_t>(bytes, 16), false)});
      Gpu::get().upload(moved_.back().gpu->data(), tensor->data, bytes, stream);
      tensor->data = moved_.back().gpu->data();
    }
  }
  tessera_status run() const {
    const tessera_device device = gpu_device();
    tessera_executor executor{};
    executor.struct_size = sizeof executor, executor.stream = stream_;
    return tessera_append(&call_, &device, &executor);
  }
  void download() {
    for (const Moved& one : moved_) Gpu::get().download(one.host, one.gpu->data(), one.bytes, stream_);
  }

 private:
  struct Moved {
    void* host;
    size_t bytes;
    std::unique_ptr<GpuBlock> gpu;
  };
  tessera_append_call call_;
  void* stream_;
  std::vector<Moved> moved_;
};

class CudaAppend : public Cuda {
 protected:
  auto on_gpu() {
    return [this](const tessera_append_call& call) {
      AppendOnGpu on_gpu(call, gpu_->stream());
      expect_ok(on_gpu.run());
      on_gpu.download();
    };
  }
};

TEST_F(CudaAppend, PutsEveryTokenWhereItBelongs) {
  constexpr std::uint64_t kForms = 200;
  for (std::uint64_t n = 0; n < kForms; ++n) {
    SCOPED_TRACE("form " + std::to_string(n));
    test::expect_right(test::draw_form(n), on_gpu());
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
}

TEST_F(CudaAppend, RoundsKeysAndValuesTo8Bits) {
  constexpr std::uint64_t kForms = 200;
  for (std::uint64_t n = 0; n < kForms; ++n) {
    SCOPED_TRACE("form " + std::to_string(n));
    test::expect_right(test::draw_form_of_codes(n), on_gpu());
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
}

TEST_F(CudaAppend, GivesTheCodesOfTheCpu) { test::expect_the_cpus_codes(on_gpu()); }

TEST_F(CudaAppend, RefusesInt8InWords) {
  test::Step step({.seed = 3});
  step.call.k_cache.layout.dtype = step.call.v_cache.layout.dtype = TESSERA_INT8;
  const tessera_status status = AppendOnGpu(step.call, gpu_->stream()).run();
  EXPECT_EQ(status.code, TESSERA_UNSUPPORTED);
  EXPECT_STREQ(status.message,
               "k_cache: dtype int8, accepted on a GPU that of k: float32, float8_e4m3 and float8_e5m2");
}

}  // namespace
}  // namespace tessera::testing
