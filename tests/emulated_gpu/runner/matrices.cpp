#include "matrices.hpp"

#include <algorithm>
#include <bit>

#include "block.hpp"
#include "core/half.hpp"

namespace tessera::emulated {
namespace {

// put_a(float [16][16], a lane's four words, its row g and column c) and put_b(float [16][8], a lane's two, c, g) store
// a lane's elements at their places.
template <class PutA, class PutB>
void mma(const char* what, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int inner,
         const PutA& put_a, const PutB& put_b) {
  struct Operands {
    float d[4];
    uint32_t a[4], b[2];
  };
  struct Sums {
    float d[4];
  };
  const Operands mine{{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  const Sums sums = here().meet<Operands, Sums>(what, mine, [&](const Operands* in, Sums* out) {
    typedef float Row __attribute__((vector_size(32)));
    alignas(64) float ra[16][16], rb[16][8];
    for (int lane = 0; lane < kWarpThreads; ++lane) {
      put_a(ra, in[lane].a, lane / 4, lane % 4);
      put_b(rb, in[lane].b, lane % 4, lane / 4);
    }
    for (int row = 0; row < 16; ++row) {
      Row sum{};
      for (int c = 0; c < 4; ++c) {
        const Operands& from = in[row % 8 * 4 + c];
        sum[2 * c] = from.d[row / 8 * 2], sum[2 * c + 1] = from.d[row / 8 * 2 + 1];
      }
      for (int k = 0; k < inner; ++k) sum += ra[row][k] * *reinterpret_cast<const Row*>(rb[k]);
      for (int c = 0; c < 4; ++c) {
        Sums& to = out[row % 8 * 4 + c];
        to.d[row / 8 * 2] = sum[2 * c], to.d[row / 8 * 2 + 1] = sum[2 * c + 1];
      }
    }
  });
  std::copy(std::begin(sums.d), std::end(sums.d), d);
}

// Lane l holds the elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 (transposed: column l / 4) of each 8 x 8 matrix.
struct Place {
  int row[2], col[2];
  Place(int lane, bool transposed) {
    const int a = lane / 4, b = lane % 4 * 2;
    for (int n = 0; n < 2; ++n) row[n] = transposed ? b + n : a, col[n] = transposed ? a : b + n;
  }
};
constexpr size_t kRowBytes = 16;

}  // namespace

// m16n8k16, row by column. With g = lane / 4 and c = lane % 4, a lane holds (g, 2c), (g + 8, 2c), (g, 2c + 8), (g + 8,
// 2c + 8) of A, each with its right neighbour, and (2c, g), (2c + 8, g) of B, each with the element below it.
void mma_16bit(const char* what, bool bfloat16, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto to_float = [bfloat16](uint32_t pair, int half) {
    const uint32_t bits = pair >> 16 * half & 0xffff;
    return bfloat16 ? std::bit_cast<float>(bits << 16) : core::float16_to_float(static_cast<uint16_t>(bits));
  };
  mma(
      what, d, a, b0, b1, 16,
      [&](float(&to)[16][16], const uint32_t(&words)[4], int g, int c) {
        for (int n = 0; n < 4; ++n)
          for (int half = 0; half < 2; ++half) to[g + n % 2 * 8][2 * c + n / 2 * 8 + half] = to_float(words[n], half);
      },
      [&](float(&to)[16][8], const uint32_t(&words)[2], int c, int g) {
        for (int n = 0; n < 2; ++n)
          for (int half = 0; half < 2; ++half) to[2 * c + n * 8 + half][g] = to_float(words[n], half);
      });
}

// m16n8k8. A lane holds (g, c), (g + 8, c), (g, c + 4), (g + 8, c + 4) of A and (c, g), (c + 4, g) of B. Bits beyond
// the 10 of the mantissa are ignored.
void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto to_float = [](uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000u); };
  mma(
      "mma.tf32", d, a, b0, b1, 8,
      [&](float(&to)[16][16], const uint32_t(&words)[4], int g, int c) {
        for (int n = 0; n < 4; ++n) to[g + n % 2 * 8][c + n / 2 * 4] = to_float(words[n]);
      },
      [&](float(&to)[16][8], const uint32_t(&words)[2], int c, int g) {
        for (int n = 0; n < 2; ++n) to[c + n * 4][g] = to_float(words[n]);
      });
}

void load_matrices(const char* what, uint32_t (&r)[4], uint32_t shared, bool transposed) {
  struct Words {
    uint32_t word[4];
  };
  Block& block = here();
  const Words got = block.meet<uint32_t, Words>(what, shared, [&](const uint32_t* rows, Words* out) {
    for (int m = 0; m < 4; ++m) {
      uint16_t element[8][8];
      for (int row = 0; row < 8; ++row) {
        std::memcpy(element[row], block.own_shared(rows[m * 8 + row], kRowBytes, kRowBytes), sizeof element[row]);
      }
      for (int lane = 0; lane < kWarpThreads; ++lane) {
        const Place at(lane, transposed);
        out[lane].word[m] = element[at.row[0]][at.col[0]] | uint32_t{element[at.row[1]][at.col[1]]} << 16;
      }
    }
  });
  std::copy(std::begin(got.word), std::end(got.word), r);
}

void store_matrices(const char* what, uint32_t shared, const uint32_t (&r)[4], bool transposed) {
  struct Rows {
    uint32_t shared, word[4];
  };
  Block& block = here();
  block.meet<Rows, char>(what, Rows{shared, {r[0], r[1], r[2], r[3]}}, [&](const Rows* in, char*) {
    for (int m = 0; m < 4; ++m) {
      uint16_t element[8][8];
      for (int lane = 0; lane < kWarpThreads; ++lane) {
        const Place at(lane, transposed);
        for (int n = 0; n < 2; ++n) element[at.row[n]][at.col[n]] = static_cast<uint16_t>(in[lane].word[m] >> 16 * n);
      }
      for (int row = 0; row < 8; ++row) {
        std::memcpy(block.own_shared(in[m * 8 + row].shared, kRowBytes, kRowBytes), element[row], sizeof element[row]);
      }
    }
  });
}

uint32_t transpose_matrix(uint32_t pair) {
  return here().meet<uint32_t, uint32_t>("movmatrix", pair, [](const uint32_t* in, uint32_t* out) {
    for (int lane = 0; lane < kWarpThreads; ++lane) {
      const Place at(lane, true);
      const auto element = [&](int n) { return in[at.row[n] * 4 + at.col[n] / 2] >> at.col[n] % 2 * 16 & 0xffffu; };
      out[lane] = element(0) | element(1) << 16;
    }
  });
}

}  // namespace tessera::emulated
