// A small test of device code: one thread block (or one cluster) runs a few lines on words of global memory, and the
// words that it writes are compared with values computed by the host. The files beside this one mirror
// kernels/tessera/ptx and kernels/tessera/tile: one file per header, one test per function.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "core/convert.hpp"

namespace tessera::testing {

enum class Archs {
  kAll,          // Ampere and later
  kHopperOn,     // Hopper and later
  kHopperAlone,  // sm_90a
};

// A tensor map of `in` or `out` as bfloat16 [rows][columns], in swizzled boxes of box_rows rows and 64 columns.
struct MapSpec {
  bool of_output = false;
  int rows = 0, columns = 64, box_rows = 8;  // rows 0: none
};

struct DeviceTest {
  std::string name;    // of the kernel, after "test_"
  std::string header;  // "tessera/ptx/mma.cuh"
  Archs archs = Archs::kAll;
  int threads = 32, blocks = 1;  // blocks 2: a cluster
  std::vector<uint32_t> in{};
  std::vector<uint32_t> expected{};  // the content of `out` at the end
  double tolerance = 0;              // 0: equal words; else floats, relative to the larger of the expected one and 1
  uint32_t fill = 0xdeadbeef;        // of `out` at the start
  MapSpec map{};
  // The body of kernel(uint32* out, const uint32* in, const __grid_constant__ TensorMap map); `t` is the thread, `lane`
  // its lane.
  std::string body;
};

// The tests of a file, known to the program before main().
struct DeviceTests {
  explicit DeviceTests(std::vector<DeviceTest> tests);
};
const std::vector<DeviceTest>& all_device_tests();

// ---- words ----

inline uint32_t word(float x) { return std::bit_cast<uint32_t>(x); }
inline uint32_t half_pair(float low, float high, bool bfloat16) {
  const auto bits = [bfloat16](float x) -> uint32_t {
    return bfloat16 ? core::float_to_bfloat16(x) : core::float_to_float16(x);
  };
  return bits(low) | bits(high) << 16;
}
// f(0), f(1) ... f(count - 1)
template <class F>
std::vector<uint32_t> words(int count, F&& f) {
  std::vector<uint32_t> all;
  for (int i = 0; i < count; ++i) all.push_back(f(i));
  return all;
}
inline std::vector<uint32_t> numbered(int count) {
  return words(count, [](int i) { return static_cast<uint32_t>(i); });
}
inline std::vector<uint32_t> operator+(std::vector<uint32_t> a, const std::vector<uint32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// ---- matrices of small whole numbers, whose products are exact in every type ----

struct Matrix {
  int rows, cols;
  std::vector<float> x;
  float at(int row, int col) const { return x[static_cast<size_t>(row) * cols + col]; }
};
inline Matrix small_numbers(int rows, int cols, int seed) {
  Matrix m{rows, cols, {}};
  uint32_t state = static_cast<uint32_t>(seed) * 2654435761u + 1;
  for (int i = 0; i < rows * cols; ++i) {
    state = state * 1664525u + 1013904223u;
    m.x.push_back(static_cast<float>(static_cast<int>(state >> 24 & 15) - 8));
  }
  return m;
}
inline Matrix transposed(const Matrix& m) {
  Matrix t{m.cols, m.rows, {}};
  for (int row = 0; row < m.cols; ++row)
    for (int col = 0; col < m.rows; ++col) t.x.push_back(m.at(col, row));
  return t;
}
inline Matrix product(const Matrix& a, const Matrix& b) {
  Matrix c{a.rows, b.cols, {}};
  for (int row = 0; row < a.rows; ++row)
    for (int col = 0; col < b.cols; ++col) {
      float sum = 0;
      for (int k = 0; k < a.cols; ++k) sum += a.at(row, k) * b.at(k, col);
      c.x.push_back(sum);
    }
  return c;
}
// Row after row: floats, or 16-bit pairs.
inline std::vector<uint32_t> float_words(const Matrix& m) {
  return words(static_cast<int>(m.x.size()), [&](int i) { return word(m.x[static_cast<size_t>(i)]); });
}
inline std::vector<uint32_t> pair_words(const Matrix& m, bool bfloat16) {
  return words(static_cast<int>(m.x.size()) / 2, [&](int i) {
    return half_pair(m.x[static_cast<size_t>(2 * i)], m.x[static_cast<size_t>(2 * i + 1)], bfloat16);
  });
}

}  // namespace tessera::testing
