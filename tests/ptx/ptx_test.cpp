// ptx_tests: every device test, compiled for each architecture that has its instructions, and run where there is a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "cuda/runtime/driver.hpp"
#include "cuda/runtime/nvrtc.hpp"
#include "cuda/runtime/tensor_map.hpp"
#include "device_test.hpp"
#include "op/gpu_memory.hpp"
#include "op/place.hpp"

namespace tessera::testing {
namespace {

using namespace tessera::cuda;

std::vector<DeviceTest>& registered() {
  static std::vector<DeviceTest> tests;
  return tests;
}

// ---- one source for all kernels of an architecture: a compilation takes seconds however many there are ----

bool serves(const DeviceTest& test, int32_t arch) {
  return test.archs == Archs::kAll || (test.archs == Archs::kHopperOn && arch >= 90) || arch == 90;
}

constexpr const char* kPrelude = R"(
namespace tessera {

// Word `w` of a row of a swizzled tile that starts at s.
template <class Tile>
TESSERA_DEVICE uint32* swizzled_word(uint32* s, int row, int w) {
  return s + (Tile::at(0, row, w * 2 / 8 * 8) / 4 + w % 4);
}
// `words` has the rows of a tile, one after another.
template <class Tile>
TESSERA_DEVICE void fill_swizzled(Tile& s, const uint32* words) {
  constexpr int kRowWords = Tile::kCols / 2;
  for (int i = static_cast<int>(threadIdx.x); i < Tile::kRows * kRowWords; i += static_cast<int>(blockDim.x)) {
    *swizzled_word<Tile>(reinterpret_cast<uint32*>(s.data), i / kRowWords, i % kRowWords) = words[i];
  }
  __syncthreads();
}
template <class Tile>
TESSERA_DEVICE void fill_tile(Tile& s, const uint32* words) {
  constexpr int kRowWords = Tile::kCols * Tile::kElemBytes / 4;
  for (int i = static_cast<int>(threadIdx.x); i < Tile::kRows * kRowWords; i += static_cast<int>(blockDim.x)) {
    *reinterpret_cast<uint32*>(s.pointer(Tile::place(i / kRowWords), i % kRowWords * 4 / Tile::kElemBytes)) = words[i];
  }
  __syncthreads();
}
template <class Tile>
TESSERA_DEVICE void put_tile(uint32* out, Tile& s) {
  constexpr int kRowWords = Tile::kCols * Tile::kElemBytes / 4;
  for (int i = static_cast<int>(threadIdx.x); i < Tile::kRows * kRowWords; i += static_cast<int>(blockDim.x)) {
    out[i] = *reinterpret_cast<uint32*>(s.pointer(Tile::place(i / kRowWords), i % kRowWords * 4 / Tile::kElemBytes));
  }
}
// A warp's accumulator, row after row of `cols` columns.
template <int kM, int kN>
TESSERA_DEVICE void put_accumulator(uint32* out, int cols, const float (&acc)[kM][kN][4]) {
  for (int m = 0; m < kM; ++m)
    for (int n = 0; n < kN; ++n)
      for (int e = 0; e < 4; ++e) {
        out[(m * 16 + e / 2 * 8 + lane_row()) * cols + n * 8 + lane_col() + e % 2] = __float_as_uint(acc[m][n][e]);
      }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <Dtype kType, int kN>
TESSERA_DEVICE void multiply_by_wgmma(uint32* out, const uint32* in) {
  using A = SwizzledTile<64, 64>;
  using B = SwizzledTile<kN, 64>;   // [n][inner]
  using Bt = SwizzledTile<64, kN>;  // [inner][n]
  __shared__ A sA;
  __shared__ union {
    alignas(1024) char bytes[1];
    B plain;
    Bt turned;
  } s;
  const int lane = lane_id(), g = lane / 4, c = lane % 4, warp = static_cast<int>(threadIdx.x) / 32;
  const TileDescriptor a{descriptor_address(shared_address(sA.data)), kDescriptorHigh};
  const TileDescriptor b{descriptor_address(shared_address(&s)), kDescriptorHigh};
  uint32 rA[4][4];
  for (int k = 0; k < 4; ++k)
    for (int i = 0; i < 4; ++i) rA[k][i] = in[(warp * 16 + g + i % 2 * 8) * 32 + k * 8 + i / 2 * 4 + c];
  float d[kN / 2];
  fill_swizzled(sA, in);
  ptx::wgmma_forget(d);
  const auto multiply = [&]<bool kTransposeB>(const auto& descriptor, bool first) {
    using Product = ptx::Wgmma<kType, kN, kTransposeB>;
    ptx::fence_proxy_async();
    __syncthreads();
    ptx::wgmma_pin(d);
#pragma unroll
    for (int k = 0; k < 4; ++k) ptx::wgmma_pin(rA[k]);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) Product::ss(d, inner_major<A>(a, 0, k * 16), descriptor(k), !first || k > 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) Product::rs(d, rA[k], descriptor(k), 1);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(d);
    __syncthreads();
  };
  fill_swizzled(s.plain, in + 64 * 32);
  multiply.template operator()<false>([&](int k) { return inner_major<B>(b, 0, k * 16); }, true);
  fill_swizzled(s.turned, in + 64 * 32 + kN * 32);
  multiply.template operator()<true>([&](int k) { return outer_major<Bt>(b, k * 16); }, false);
  for (int i = 0; i < kN / 2; ++i) {
    out[(warp * 16 + g + i / 2 % 2 * 8) * kN + i / 4 * 8 + 2 * c + i % 2] = __float_as_uint(d[i]);
  }
}

// The same of e4m3, B as [n][inner] alone.
template <int kN>
TESSERA_DEVICE void multiply_by_wgmma_e4m3(uint32* out, const uint32* in) {
  using A = SwizzledTile<64, 64>;  // 128 columns of 8 bits
  using B = SwizzledTile<kN, 64>;
  using Product = ptx::WgmmaE4m3<kN>;
  __shared__ A sA;
  __shared__ B sB;
  const int lane = lane_id(), g = lane / 4, c = lane % 4, warp = static_cast<int>(threadIdx.x) / 32;
  const TileDescriptor a{descriptor_address(shared_address(sA.data)), kDescriptorHigh};
  const TileDescriptor b{descriptor_address(shared_address(sB.data)), kDescriptorHigh};
  uint32 rA[4][4];
  for (int k = 0; k < 4; ++k)
    for (int i = 0; i < 4; ++i) rA[k][i] = in[(warp * 16 + g + i % 2 * 8) * 32 + k * 8 + i / 2 * 4 + c];
  float d[kN / 2];
  fill_swizzled(sA, in);
  fill_swizzled(sB, in + 64 * 32);
  ptx::wgmma_forget(d);
  ptx::fence_proxy_async();
  __syncthreads();
  ptx::wgmma_pin(d);
#pragma unroll
  for (int k = 0; k < 4; ++k) ptx::wgmma_pin(rA[k]);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) Product::ss(d, inner_major<A>(a, 0, k * 16), inner_major<B>(b, 0, k * 16), k > 0);
#pragma unroll
  for (int k = 0; k < 4; ++k) Product::rs(d, rA[k], inner_major<B>(b, 0, k * 16), 1);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_pin(d);
  for (int i = 0; i < kN / 2; ++i) {
    out[(warp * 16 + g + i / 2 % 2 * 8) * kN + i / 4 * 8 + 2 * c + i % 2] = __float_as_uint(d[i]);
  }
}
#endif

}  // namespace tessera
)";

std::string source_for(int32_t arch) {
  std::set<std::string> headers = {"tessera/tile/wgmma_tile.cuh", "tessera/tile/product.cuh",
                                   "tessera/ptx/async_copy.cuh", "tessera/tile/pipeline.cuh",
                                   "tessera/ptx/wgmma_e4m3.cuh"};
  for (const DeviceTest& test : registered()) headers.insert(test.header);
  std::ostringstream source;
  for (const std::string& header : headers) source << "#include \"" << header << "\"\n";
  source << kPrelude;
  for (const DeviceTest& test : registered()) {
    if (!serves(test, arch)) continue;
    source << "extern \"C\" __global__ void __launch_bounds__(" << test.threads << ", 1) "
           << (test.blocks > 1 ? "__cluster_dims__(" + std::to_string(test.blocks) + ", 1, 1) " : "") << "test_"
           << test.name
           << "(tessera::uint32* out, const tessera::uint32* in, const __grid_constant__ tessera::TensorMap map) {\n"
              "  using namespace tessera;\n"
              "  [[maybe_unused]] const int t = static_cast<int>(threadIdx.x), lane = t % 32;\n"
           << test.body << "\n}\n";
  }
  return source.str();
}

// The first kernel's name stands for the whole binary.
tessera_status compile_for(int32_t arch, Binary& binary, std::string& log) {
  for (const DeviceTest& test : registered()) {
    if (serves(test, arch)) return compile_kernel(source_for(arch), "test_" + test.name, arch, binary, &log);
  }
  return {};
}

class Ptx : public ::testing::TestWithParam<int32_t> {};

TEST_P(Ptx, Compiles) {
  CompilerInfo compiler;
  if (const tessera_status found = open_compiler(compiler); found.code != TESSERA_OK)
    GTEST_SKIP() << "skipped: " << found.message;
  Binary binary;
  std::string log;
  const tessera_status status = compile_for(GetParam(), binary, log);
  ASSERT_EQ(status.code, TESSERA_OK) << status.message << "\n" << log;
  for (const char* loss : {"wgmma.mma_async instructions are serialized", "'setmaxnreg' ignored"}) {
    EXPECT_EQ(log.find(loss), std::string::npos) << log;
  }
}

INSTANTIATE_TEST_SUITE_P(Arch, Ptx, ::testing::Values(80, 90, 120),
                         [](const auto& arch) { return target_name(arch.param); });

// A function of these headers that no test names.
TEST(PtxTests, NameEveryFunction) {
  // Called by what is tested.
  const std::set<std::string> kThrough = {"address",
                                          "at",
                                          "pointer",
                                          "load",
                                          "load_part",
                                          "load_a",
                                          "load_a_transposed",
                                          "load_b_pair",
                                          "load_b_pair_transposed",
                                          "pack_a",
                                          "load_shared_pair",
                                          "for_fragments",
                                          "multiply_steps",
                                          "multiply_columns",
                                          "beyond",
                                          "mma_16bit",
                                          "mma_3xtf32",
                                          "lane_id",
                                          "lane_row",
                                          "lane_col",
                                          "wgmma_descriptor",
                                          "init",
                                          "ss",
                                          "rs",
                                          "pair_of_codes",
                                          "low_codes",
                                          "high_codes",
                                          "operator",
                                          "StridedLoads",
                                          "widen_pair",
                                          "has_special",
                                          "widen_codes",
                                          "stage"};
  std::string bodies = kPrelude;
  for (const DeviceTest& test : registered()) bodies += test.body + "\n";
  const std::regex function(R"(TESSERA_DEVICE (?:static |constexpr )*(?:auto|[\w:<>,\* &]+?)[ &\*](\w+)\()");
  std::set<std::string> missing;
  int found = 0;
  for (const char* folder : {"ptx", "tile"}) {
    for (const auto& file :
         std::filesystem::directory_iterator(std::filesystem::path(TESSERA_KERNELS) / "tessera" / folder)) {
      std::ifstream in(file.path());
      for (std::string line; std::getline(in, line);) {
        std::smatch match;
        if (!std::regex_search(line, match, function)) continue;
        ++found;
        const std::string name = match[1];
        if (!kThrough.contains(name) && !std::regex_search(bodies, std::regex("\\b" + name + "\\b")))
          missing.insert(name);
      }
    }
  }
  EXPECT_GT(found, 100) << "the headers' form has changed";
  EXPECT_TRUE(missing.empty()) << ::testing::PrintToString(missing);
}

// ---- on a GPU ----

class PtxGpu : public ::testing::TestWithParam<size_t> {
 protected:
  static void SetUpTestSuite() {
    if (!gpu_missing().empty()) return;
    Gpu::get();
    std::string log;
    Binary binary;
    const tessera_status compiled = compile_for(gpu_device().arch, binary, log);
    ASSERT_EQ(compiled.code, TESSERA_OK) << compiled.message << "\n" << log;
    ASSERT_EQ(open_driver(driver).code, TESSERA_OK);
    const CUresult loaded =
        driver->cuLibraryLoadData(&library, binary.cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    ASSERT_EQ(loaded, kCudaSuccess) << check(*driver, loaded, "cuLibraryLoadData").message;
  }
  static const Driver* driver;
  static CUlibrary library;
};
const Driver* PtxGpu::driver = nullptr;
CUlibrary PtxGpu::library = nullptr;

TEST_P(PtxGpu, WritesWhatTheHostComputes) {
  if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
  const DeviceTest& test = registered()[GetParam()];
  if (!serves(test, gpu_device().arch))
    GTEST_SKIP() << "skipped: not an instruction of " << target_name(gpu_device().arch);
  Gpu& gpu = Gpu::get();
  constexpr size_t kGuardWords = 64;  // after the output, which stay as they are
  std::vector<uint32_t> got(test.expected.size() + kGuardWords, test.fill);
  const size_t out_bytes = got.size() * 4, in_bytes = test.in.size() * 4;
  GpuBlock out(out_bytes, false), in(in_bytes, false);
  gpu.upload(out.data(), got.data(), out_bytes, gpu.stream());
  if (in_bytes > 0) gpu.upload(in.data(), test.in.data(), in_bytes, gpu.stream());

  TensorMap map{};
  if (test.map.rows > 0) {
    const int64_t rows = test.map.rows, columns = test.map.columns;
    tessera_layout layout{};  // [batch, row, head, column]
    layout.dtype = TESSERA_BFLOAT16, layout.rank = 4;
    const int64_t shape[] = {1, rows, 1, columns}, strides[] = {rows * columns, columns, columns, 1};
    std::copy(std::begin(shape), std::end(shape), layout.shape);
    std::copy(std::begin(strides), std::end(strides), layout.strides);
    const Box box{BoxLayout::kSwizzled, test.map.box_rows, kSwizzledRowBytes};
    const tessera_status status =
        make_tensor_map(*driver, gpu_device(), "tensor", layout, test.map.of_output ? out.data() : in.data(), box, map);
    ASSERT_EQ(status.code, TESSERA_OK) << status.message;
  }
  CUkernel kernel = nullptr;
  CUfunction function = nullptr;
  ASSERT_EQ(driver->cuLibraryGetKernel(&kernel, library, ("test_" + test.name).c_str()), kCudaSuccess);
  ASSERT_EQ(driver->cuKernelGetFunction(&function, kernel), kCudaSuccess);
  void* out_data = out.data();
  void* in_data = in.data();
  void* arguments[] = {&out_data, &in_data, &map};
  const CUresult launched =
      driver->cuLaunchKernel(function, static_cast<unsigned>(test.blocks), 1, 1, static_cast<unsigned>(test.threads), 1,
                             1, 0, static_cast<CUstream>(gpu.stream()), arguments, nullptr);
  ASSERT_EQ(launched, kCudaSuccess) << check(*driver, launched, "cuLaunchKernel").message;
  gpu.download(got.data(), out.data(), out_bytes, gpu.stream());

  for (size_t i = 0; i < test.expected.size(); ++i) {
    const uint32_t wanted = test.expected[i];
    if (got[i] == wanted) continue;
    const float x = std::bit_cast<float>(got[i]), y = std::bit_cast<float>(wanted);
    const bool close = std::abs(x - y) <= test.tolerance * std::max(1.0f, std::abs(y));  // NaN is not
    ASSERT_TRUE(test.tolerance > 0 && close)
        << "word " << i << ": " << got[i] << " (" << x << "), expected " << wanted << " (" << y << ")";
  }
  for (size_t i = test.expected.size(); i < got.size(); ++i)
    ASSERT_EQ(got[i], test.fill) << "written past the end: word " << i;
}

// Known once all files' tests are.
std::vector<size_t> indices() {
  std::vector<size_t> all(registered().size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = i;
  return all;
}

}  // namespace

DeviceTests::DeviceTests(std::vector<DeviceTest> tests) {
  for (DeviceTest& test : tests) registered().push_back(std::move(test));
}
const std::vector<DeviceTest>& all_device_tests() { return registered(); }

namespace {
// gtest requests the values when it starts, after the constructors of all files.
INSTANTIATE_TEST_SUITE_P(Device, PtxGpu, ::testing::ValuesIn(indices()),
                         [](const auto& index) { return registered()[index.param].name; });
}  // namespace

}  // namespace tessera::testing
