// The products (wgmma) that a warpgroup has issued. They run in order, at once or when one is waited for, and their
// results are in the threads' registers after the wait. Every sum is in float32: it is not emulated that a GPU's tensor
// cores keep fewer bits of a sum of 8-bit products.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "product.hpp"
#include "runner/matrix_descriptor.hpp"

namespace tessera::emulated {

class WarpgroupProducts {
 public:
  static constexpr uint64_t kInFlight = 128;

  void reset() {
    for (const std::unique_ptr<Issued>& issued : issued_) {
      if (issued) issued->threads = 0;
    }
    held_ = false;
    executed_ = complete_ = 0;
  }

  // Returns false if there is no room until the other threads have issued theirs.
  bool may_issue(const ProductPosition& at) const { return at.issued < executed_ + kInFlight; }
  const uint64_t* executed() const { return &executed_; }
  const uint64_t* complete() const { return &complete_; }

  // Returns "" or the error. `lane`: 0 ... 127.
  const char* issue(ProductPosition& at, int lane, const Product& product, float* d, const uint32_t* a) {
    Issued& to = at_index(at.issued++);
    if (to.threads == 0) {
      to.product = product;
    } else if (!(to.product == product)) {
      return "the warpgroup's threads issue different products";
    }
    to.d[lane] = d;
    if (product.a_in_registers) std::memcpy(to.a[lane], a, sizeof to.a[lane]);
    if (++to.threads == kWarpgroupThreads) complete_ = at.issued;
    return "";
  }
  void commit(ProductPosition& at) { at.committed[at.groups++ % 8] = at.issued; }

  // The number of products that all but the newest `pending` groups of the thread include.
  static uint64_t due(const ProductPosition& at, unsigned pending) {
    return at.groups <= pending ? 0 : at.committed[(at.groups - 1 - pending) % 8];
  }

  // Executes the products that all threads have issued, up to `end`. Returns "" or the error.
  const char* execute(uint64_t end, const SharedWindow& shared) {
    while (executed_ < end && executed_ < complete_) {
      Issued& next = at_index(executed_);
      const char* wrong = run(next, shared);
      if (*wrong) return wrong;
      next.threads = 0;
      ++executed_;
    }
    return "";
  }

  // Writes the sums to the registers.
  void write_registers() {
    if (!held_) return;
    held_ = false;
    move_registers<false>();
  }

 private:
  typedef float Vector __attribute__((vector_size(64), aligned(64)));  // 16 columns
  static constexpr int kVectorCols = 16, kMostVectors = kMostProductCols / kVectorCols;

  struct Issued {
    Product product;
    int threads = 0;
    float* d[kWarpgroupThreads];
    uint32_t a[kWarpgroupThreads][4];
  };
  Issued& at_index(uint64_t n) {
    std::unique_ptr<Issued>& it = issued_[n % kInFlight];
    if (!it) it = std::make_unique<Issued>();
    return *it;
  }

  // Lane l of warp w has (16 w + l / 4 + 8 h, 8 t + 2 (l % 4) + 0 ... 1) at d[4 t + 2 h + 0 ... 1].
  template <bool kFromRegisters>
  void move_registers() {
    float* const sums = reinterpret_cast<float*>(sums_->at);
    for (int thread = 0; thread < kWarpgroupThreads; ++thread) {
      float* const d = held_d_[thread];
      const int row = thread / 32 * 16 + thread % 32 / 4, col = thread % 4 * 2;
      for (int half = 0; half < 2; ++half) {
        float* const sum = sums + (row + 8 * half) * kMostProductCols + col;
        for (int t = 0; t < held_cols_ / 8; ++t) {
          if (kFromRegisters) {
            std::memcpy(sum + 8 * t, d + 4 * t + 2 * half, 2 * sizeof(float));
          } else {
            std::memcpy(d + 4 * t + 2 * half, sum + 8 * t, 2 * sizeof(float));
          }
        }
      }
    }
  }

  static float to_float(uint32_t bits, bool bfloat16) {
    return bfloat16 ? std::bit_cast<float>(bits << 16) : core::float16_to_float(static_cast<uint16_t>(bits));
  }

  const char* run(const Issued& of, const SharedWindow& shared) {
    const Product& p = of.product;
    if (!sums_) sums_ = std::make_unique<Sums>();
    const bool same = held_ && held_cols_ == p.cols && std::memcmp(held_d_, of.d, sizeof of.d) == 0;
    if (!same) {
      write_registers();
      std::memcpy(held_d_, of.d, sizeof of.d);
      held_cols_ = p.cols;
      if (p.accumulate) move_registers<true>();
    }
    held_ = true;
    if (!p.accumulate) std::memset(static_cast<void*>(sums_.get()), 0, sizeof *sums_);

    // B [inner][cols], A [64][inner]
    const int inner = p.inner();
    alignas(64) float b[kMostProductInner][kMostProductCols], a[kProductRows][kMostProductInner];
    const MatrixDescriptor from_b(p.b);
    const char* wrong = p.e4m3           ? from_b.read_inner_major_turned_e4m3(b, p.cols, shared)
                        : p.b_transposed ? from_b.read_outer_major(b, p.cols, p.bfloat16, shared)
                                         : from_b.read_inner_major_turned(b, p.cols, p.bfloat16, shared);
    if (*wrong) return wrong;
    if (p.a_in_registers && p.e4m3) {
      for (int thread = 0; thread < kWarpgroupThreads; ++thread) {
        const int row = thread / 32 * 16 + thread % 32 / 4, col = thread % 4 * 4;
        for (int r = 0; r < 4; ++r)
          for (int byte = 0; byte < 4; ++byte) {
            a[row + r % 2 * 8][col + r / 2 * 16 + byte] = e4m3_to_float(of.a[thread][r] >> 8 * byte);
          }
      }
    } else if (p.a_in_registers) {
      for (int thread = 0; thread < kWarpgroupThreads; ++thread) {
        const int row = thread / 32 * 16 + thread % 32 / 4, col = thread % 4 * 2;
        for (int r = 0; r < 4; ++r) {
          float* const to = a[row + r % 2 * 8] + col + r / 2 * 8;
          to[0] = to_float(of.a[thread][r] & 0xffff, p.bfloat16), to[1] = to_float(of.a[thread][r] >> 16, p.bfloat16);
        }
      }
    } else {
      const MatrixDescriptor from_a(p.a);
      wrong = p.e4m3 ? from_a.read_inner_major_e4m3(a, shared) : from_a.read_inner_major(a, p.bfloat16, shared);
      if (*wrong) return wrong;
    }
    for (int v = 0; v < p.cols / kVectorCols; ++v) {
      Vector rb[kMostProductInner];
      for (int k = 0; k < inner; ++k) rb[k] = *reinterpret_cast<const Vector*>(b[k] + v * kVectorCols);
      for (int row = 0; row < kProductRows; row += 4) {
        Vector sum[4];
        for (int r = 0; r < 4; ++r) sum[r] = sums_->at[row + r][v];
        for (int k = 0; k < inner; ++k)
          for (int r = 0; r < 4; ++r) sum[r] += a[row + r][k] * rb[k];
        for (int r = 0; r < 4; ++r) sums_->at[row + r][v] = sum[r];
      }
    }
    return "";
  }

  struct Sums {
    Vector at[kProductRows][kMostVectors];
  };
  std::unique_ptr<Issued> issued_[kInFlight];
  std::unique_ptr<Sums> sums_;
  float* held_d_[kWarpgroupThreads] = {};  // registers that those sums belong to
  int held_cols_ = 0;
  bool held_ = false;
  uint64_t executed_ = 0, complete_ = 0;
};

}  // namespace tessera::emulated
