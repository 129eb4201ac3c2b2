// products.hpp implements the products.
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

template <int kRegisters>
void setmaxnreg_inc() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
}
template <int kRegisters>
void setmaxnreg_dec() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
}

inline void wgmma_fence() {}
inline void wgmma_commit_group() { emulated::here().commit_products(); }
template <int kPending>
void wgmma_wait_group() {
  static_assert(kPending >= 0 && kPending < 8);
  emulated::here().wait_products(kPending);
}
template <class Registers>
void wgmma_pin(Registers&) {}
template <class Registers>
void wgmma_forget(Registers&) {}

template <Dtype kDtype, int kN, bool kTransposeB>
struct Wgmma {
  static_assert(kDtype != Dtype::kFloat32 && kN % 16 == 0 && kN <= emulated::kMostProductCols);
  static void ss(float (&d)[kN / 2], unsigned long long a, unsigned long long b, int accumulate) {
    issue({.a = a, .b = b, .accumulate = accumulate != 0}, d, nullptr);
  }
  static void rs(float (&d)[kN / 2], const uint32 (&a)[4], unsigned long long b, int accumulate) {
    issue({.b = b, .a_in_registers = true, .accumulate = accumulate != 0}, d, a);
  }

 private:
  static void issue(emulated::Product product, float* d, const uint32* a) {
    product.cols = kN, product.b_transposed = kTransposeB, product.bfloat16 = kDtype == Dtype::kBFloat16;
    emulated::here().issue_product(product, d, a);
  }
};

}  // namespace tessera::ptx
