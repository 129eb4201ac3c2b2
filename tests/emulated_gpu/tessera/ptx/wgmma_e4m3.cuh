#pragma once

#include "tessera/ptx/wgmma.cuh"

namespace tessera::ptx {

template <int kN>
struct WgmmaE4m3 {
  static_assert(kN % 16 == 0 && kN <= emulated::kMostProductCols);
  static void ss(float (&d)[kN / 2], unsigned long long a, unsigned long long b, int accumulate) {
    issue({.a = a, .b = b, .accumulate = accumulate != 0}, d, nullptr);
  }
  static void rs(float (&d)[kN / 2], const uint32 (&a)[4], unsigned long long b, int accumulate) {
    issue({.b = b, .a_in_registers = true, .accumulate = accumulate != 0}, d, a);
  }

 private:
  static void issue(emulated::Product product, float* d, const uint32* a) {
    product.cols = kN, product.e4m3 = true;
    emulated::here().issue_product(product, d, a);
  }
};

}  // namespace tessera::ptx
