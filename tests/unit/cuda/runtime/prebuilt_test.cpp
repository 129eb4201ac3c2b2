// Kernels compiled ahead of time (by tests/fake_nvrtc, beside this program), and calls that find them without NVRTC, on
// GPUs that are older and newer than what was compiled for (tests/fake_driver).
#include "cuda/prebuilt.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "cuda/cuda.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "cuda/runtime/nvrtc.hpp"
#include "tessera/tensor.hpp"

// By the address of this function the library finds its folder: here this program's, so that no other test finds the
// kernels beside it.
extern "C" const char* tessera_version(void) { return "of prebuilt_test"; }

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

TEST(CudaPrebuiltMade, ForEveryTarget) {
  const fs::path folder = fs::path(library_folder()) / "aot";
  fs::remove_all(folder);
  Writers writers;
  writers.add_installation(folder);
  Cache cache(folder, writers);
  int64_t compiled = 0;
  const tessera_status status = warm(cache, prebuilt_targets(), [&](const Warmed& warmed) {
    compiled += warmed.origin == Origin::kCompiled;
    EXPECT_STREQ(warmed.binary.cubin.c_str(), target_name(warmed.target).c_str());
    EXPECT_EQ(warmed.binary.ptx, warmed.target.ptx);
  });
  ASSERT_EQ(status.code, TESSERA_OK) << status.message;
  EXPECT_GT(compiled, 400);
  EXPECT_EQ(static_cast<int64_t>(cache.list().size()), compiled);
}

// The GPU of this process, as FAKE_CUDA_MAJOR and FAKE_CUDA_MINOR have it. One that this library does not know has as
// much shared memory as 11.0.
tessera_device gpu() {
  tessera_device found{}, device{};
  EXPECT_EQ(tessera_device_cuda(0, &found).code, TESSERA_OK);
  if (tessera_device_cuda_arch(found.arch, &device).code != TESSERA_OK) {
    EXPECT_EQ(tessera_device_cuda_arch(110, &device).code, TESSERA_OK);
  }
  device.arch = found.arch;
  device.ordinal = 0;
  return device;
}

// Training, and decoding.
std::vector<tessera_problem> problems() {
  constexpr int64_t kKeys = 4096;
  tessera_problem forward, backward, decode;
  for (tessera_problem* p : {&forward, &backward, &decode}) {
    tessera_problem_init(p);
    p->causal = 1;
    p->q = p->o = layout(bfloat16, {1, p == &decode ? 1 : kKeys, 32, 128});
    p->k = p->v = layout(bfloat16, {1, kKeys, 8, 128});
    p->lse = layout(float32, {1, 32, p->q.shape[1]});
  }
  backward.direction = TESSERA_BACKWARD;
  backward.d_o = backward.d_q = backward.q, backward.d_k = backward.d_v = backward.k;
  return {forward, backward, decode};
}

TEST(CudaPrebuiltUsed, ByTheFirstCallWithoutNvrtc) {
  CompilerInfo compiler;
  ASSERT_EQ(find_compiler(compiler).code, TESSERA_UNSUPPORTED);
  const tessera_device device = gpu();
  for (const tessera_problem& problem : problems()) {
    tessera_plan plan;
    tessera_status status = tessera_make_plan(&problem, &device, &plan);
    ASSERT_EQ(status.code, TESSERA_OK) << status.message;
    LaunchList list;
    status = lower(plan, tessera_buffers{}, nullptr, list);
    ASSERT_EQ(status.code, TESSERA_OK) << status.message;
    status = prepare(list, device);
    ASSERT_EQ(status.code, TESSERA_OK) << status.message;
  }
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(driver, nullptr);
  const std::string log = reinterpret_cast<const char* (*)()>(dlsym(driver, "fake_cuda_log"))();
  const std::string line = std::string("loads ") + std::getenv("EXPECTED_TARGET") + "\n";
  ASSERT_NE(log, "");
  for (size_t at = 0; at < log.size(); at += line.size()) ASSERT_EQ(log.substr(at, line.size()), line);
}

// Whatever is prebuilt for an architecture is so for every GPU that runs its kernels.
TEST(CudaPrebuiltUsed, ForEveryPrebuiltProblem) {
  const int32_t arch = gpu().arch;
  tessera_device described{};
  if (tessera_device_cuda_arch(arch, &described).code != TESSERA_OK) GTEST_SKIP() << "skipped: an unknown architecture";
  Cache empty("");
  for (const PrebuiltKernel& kernel : prebuilt_kernels(arch)) {
    Binary binary;
    Origin origin{};
    const tessera_status status = find_binary(kernel.spec, arch, empty, binary, &origin);
    EXPECT_EQ(status.code, TESSERA_OK) << kernel.spec.name << "<" << kernel.spec.config << ">: " << status.message;
    EXPECT_EQ(origin, Origin::kPrebuilt);
    EXPECT_STREQ(binary.cubin.c_str(), std::getenv("EXPECTED_TARGET"));
  }
}

}  // namespace
}  // namespace tessera::cuda
