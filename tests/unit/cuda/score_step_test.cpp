// A score program in the score steps, kernels/tessera/attention/score, on the host (tests/emulated_gpu): every
// pair gets the values of its own head, query, key and distance, although a lane computes each once for several pairs.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "tessera/attention/backward/params.hpp"
#include "tessera/attention/score/transposed_step.cuh"
#include "unit_launch.hpp"

namespace tessera {
namespace {

// Numbers that float32 holds exactly, different for different heads, queries, keys and distances. A distance's is an
// element of a table [heads, kDistances], which ends before the least and before the largest distance; 0 outside.
constexpr int kDistances = 190, kDistanceZero = 100, kHeads = 4;
struct SharingProgram {
  static constexpr bool kChangesScore = true, kHasMask = true, kMaskNeedsS = false, kSteady = false, kAffine = false;
  static constexpr bool kPassesGradient = false, kSlopeNeedsS = false, kCapped = false, kScalesByHead = false;
  struct Head {
    int h;
  };
  struct Row {
    int i;
  };
  struct Column {
    int j;
  };
  struct Diagonal {
    int distance;
  };
  using Params = ScoreProgramParams;
  static Head head(const Params&, const ProgramPlace& at) { return {at.h + 10 * at.b}; }
  static Row row(const Params&, const Head& head, const ProgramPlace& at) { return {at.i + 1000 * head.h}; }
  static Column column(const Params&, const Head& head, const ProgramPlace& at) { return {at.j + 1000 * head.h}; }
  static Diagonal diagonal(const Params& p, const Head&, const ProgramPlace& at) {
    return {program::load<ElementType::kInt32, true>(p.tensors[0], true, at.h, at.i - at.j + kDistanceZero)};
  }
  static constexpr bool kStepsAlongDiagonal = true;
  struct DiagonalAddresses {
    const char* distance;
  };
  static bool diagonal_addresses(const Params& p, const Head&, const ProgramPlace& at, int least, int most,
                                 DiagonalAddresses& to) {
    const int index = at.i - at.j + kDistanceZero;
    to.distance = program::address_of<true>(p.tensors[0], at.h, index);
    return program::holds(p.tensors[0], at.h, index + least) && program::holds(p.tensors[0], at.h, index + most);
  }
  static Diagonal diagonal_inside(const Params&, const Head&, const DiagonalAddresses& from, const ProgramPlace& at) {
    ++inside;
    return {program::element_at<ElementType::kInt32>(from.distance + 4 * (at.i_offset - at.j_offset))};
  }
  static inline int inside = 0;  // calls
  static float score(const Params&, const Head& head, const Row& row, const Column& column, const Diagonal& diagonal,
                     const ProgramPlace&, float s) {
    return s + static_cast<float>(head.h + 3 * row.i + 7 * column.j + 31 * diagonal.distance);
  }
  static bool visible(const Params&, const Head& head, const Row& row, const Column& column, const Diagonal& diagonal,
                      const ProgramPlace&, float) {
    return (head.h + row.i / 3 + column.j * 5 + (diagonal.distance & 6)) % 4 != 0;
  }
  static Head gradient_head(const Params& p, const ProgramPlace& at) { return head(p, at); }
  static Row gradient_row(const Params& p, const Head& of, const ProgramPlace& at) { return row(p, of, at); }
  static Column gradient_column(const Params& p, const Head& of, const ProgramPlace& at) { return column(p, of, at); }
  static Diagonal gradient_diagonal(const Params& p, const Head& of, const ProgramPlace& at) {
    return diagonal(p, of, at);
  }
  template <class Sink>
  static float gradient(const Params& p, const Head& head, const Row& row, const Column& column,
                        const Diagonal& diagonal, const ProgramPlace& at, float g, float, Sink&) {
    return score(p, head, row, column, diagonal, at, g);
  }
};

}  // namespace

template <>
struct ProgramTypes<true> {
  using Program = SharingProgram;
  using Params = ProgrammedParams<ProblemParams>;
};

namespace {

constexpr int kBatch = 2, kHead = 3, kQueries = 141, kKeys = 200;
constexpr float kScale = 0.5f, kInfinity = std::numeric_limits<float>::infinity();

constexpr ScoreConfig kScore = [] {
  ScoreConfig score{};
  score.program = true;
  return score;
}();

const std::vector<int>& distances() {
  static const std::vector<int> table = [] {
    std::vector<int> all;
    for (int n = 0; n < kHeads * kDistances; ++n) all.push_back(n % kDistances - 77 + n / kDistances * 1000);
    return all;
  }();
  return table;
}

ProgrammedParams<ProblemParams> params() {
  ProgrammedParams<ProblemParams> p{};
  ProgramTensor& table = p.program.tensors[0];
  table.data = distances().data();
  table.stride[0] = {4 * kDistances, 0}, table.stride[1] = {4, 0};
  table.extent[0] = kHeads, table.extent[1] = kDistances;
  p.scale = kScale, p.window_left = p.window_right = -1;
  p.program.whole.group = Divisor(1);
  return p;
}

// What the program makes of a score before it, one pair at a time.
float expected(int head, int i, int j, float s, bool shows_all) {
  const ScoreProgramParams none = params().program;
  const ProgramPlace at{kBatch, head, head, i, j, i + kKeys - kQueries, kQueries, kKeys};
  using P = SharingProgram;
  const P::Head of = P::head(none, at);
  const auto row = P::row(none, of, at);
  const auto column = P::column(none, of, at);
  const auto diagonal = P::diagonal(none, of, at);
  if (!shows_all && !P::visible(none, of, row, column, diagonal, at, s)) return -kInfinity;
  return P::score(none, of, row, column, diagonal, at, s);
}

float product(int i, int j) { return static_cast<float>((i * 5 + j * 11) % 64); }

// kDiagonals: the registers for values of i - j that are loaded ahead.
template <bool kOneHeadOfRows, int kRowsOfLane, int kDiagonals>
struct Coordinates {
  static constexpr int kRows = kRowsOfLane, kAheadRows = kRows, kN = 8, kDiagonalRegisters = kDiagonals;
  static constexpr bool kLaneOrder = false, kFused = true, kOneHead = kOneHeadOfRows;
  const ProblemParams& p;
  int key0, row0, lane;
  Sequence s{.q_begin = 0, .sq = kQueries, .k_begin = 0, .sk = kKeys, .k_rows = kKeys, .own = 0, .row_begin = 0};

  const Sequence& sequence() const { return s; }
  int batch() const { return kBatch; }
  int head(int row) const { return kOneHead ? kHead : row / 8 % 2; }
  int query(int row) const { return row; }
  int col() const { return lane % 4 * 2; }
  int row(int i) const { return std::min(row0 + i * 8 + lane / 4, kQueries - 1); }
};

template <bool kOneHead, int kRows, int kDiagonals>
void expect_rows() {
  constexpr int kM = kRows / 2;
  using At = Coordinates<kOneHead, kRows, kDiagonals>;
  using Step = ScoreStep<kScore, At>;
  static_assert(Step::loads_diagonals() == (kDiagonals > 0));
  const auto p = params();
  int hidden = 0;
  for (const bool shows_all : {false, true}) {
    for (const int key0 : {0, 64, 136}) {
      for (const int row0 : {0, 16, 64, 112, 128}) {
        const auto query = [&](int lane, int m, int e) { return row0 + m * 16 + e / 2 * 8 + lane / 4; };
        const auto key = [&](int lane, int n, int e) { return key0 + n * 8 + lane % 4 * 2 + e % 2; };
        float s[32][kM][8][4];
        emulated::run_blocks({1, 1, 1}, 32, 0, [&] {
          const int lane = static_cast<int>(threadIdx.x);
          const At at{p, key0, row0, lane};
          for (int m = 0; m < kM; ++m)
            for (int n = 0; n < 8; ++n)
              for (int e = 0; e < 4; ++e) s[lane][m][n][e] = product(query(lane, m, e), key(lane, n, e));
          Step step;
          step.load_diagonals(at);
          step.apply_by_keys(s[lane], at, shows_all);
        });
        for (int lane = 0; lane < 32; ++lane)
          for (int m = 0; m < kM; ++m)
            for (int n = 0; n < 8; ++n)
              for (int e = 0; e < 4; ++e) {
                const int i = query(lane, m, e), j = key(lane, n, e);
                if (i >= kQueries) continue;
                const int head = At{p, key0, row0, lane}.head(i);
                const float x = expected(head, i, j, product(i, j) * kScale, shows_all);
                ASSERT_EQ(s[lane][m][n][e], x) << i << ' ' << j << ' ' << shows_all;
                hidden += x == -kInfinity;
              }
      }
    }
  }
  EXPECT_GT(hidden, 1000);
}

TEST(CudaScoreStep, GivesEveryPairOfQueryRowsItsOwnValues) { expect_rows<true, 4, 0>(); }
TEST(CudaScoreStep, GivesRowsOfSeveralHeadsTheirOwnValues) { expect_rows<false, 4, 0>(); }
TEST(CudaScoreStep, LoadsValuesOfDistancesAhead) {
  SharingProgram::inside = 0;
  expect_rows<true, 2, 18>();
  EXPECT_GT(SharingProgram::inside, 0);
}

// Rows are keys, as in the backward kernels.
template <int kSets>
struct KeyCoordinates {
  static constexpr bool kTransposed = true, kKeepsProduct = false, kCollects = false, kAhead = false, kSums = false,
                        kDividesByFactor = false;
  static constexpr int kM = kSets;
  static constexpr float kCollectUnit = 1;
  const ProblemParams& p;
  int query0, key0, lane_;
  Sequence s{.q_begin = 0, .sq = kQueries, .k_begin = 0, .sk = kKeys, .k_rows = kKeys, .own = 0, .row_begin = 0};

  const Sequence& sequence() const { return s; }
  int batch() const { return kBatch; }
  int head() const { return kHead; }
  int row0() const { return query0; }
  int key() const { return key0; }
  int lane() const { return lane_; }
};

template <int kM>
void expect_keys() {
  using Step = ScoreStep<kScore, KeyCoordinates<kM>>;
  const auto p = params();
  int hidden = 0;
  for (const bool shows_all : {false, true}) {
    for (const int query0 : {0, 64, 120}) {
      const auto query = [&](int lane, int m, int n) { return query0 + m * 8 + lane % 4 * 2 + n % 2; };
      const auto key = [&](int lane, int n) { return 48 + lane / 4 + n / 2 * 8; };
      float s[32][kM][4], ds[32][kM][2][2];
      emulated::run_blocks({1, 1, 1}, 32, 0, [&] {
        const int lane = static_cast<int>(threadIdx.x);
        const KeyCoordinates<kM> at{p, query0, 48, lane};
        for (int m = 0; m < kM; ++m)
          for (int n = 0; n < 4; ++n) s[lane][m][n] = product(query(lane, m, n), key(lane, n));
        Step step;
        step.apply(at, s[lane], shows_all);
        const auto head = Step::gradient_head(at);
        for (int m = 0; m < kM; ++m)
          for (int half = 0; half < 2; ++half) {
            float(&d)[2] = ds[lane][m][half];
            d[0] = 5, d[1] = 6;
            Step::gradient(
                at, head, m, half, {0.5f, 0.0f}, [](int) { return float2{}; }, d);
          }
      });
      for (int lane = 0; lane < 32; ++lane)
        for (int m = 0; m < kM; ++m)
          for (int n = 0; n < 4; ++n) {
            const int i = query(lane, m, n), j = key(lane, n);
            const float score = product(i, j) * kScale;
            const float x = i < kQueries ? expected(kHead, i, j, score, shows_all) : -kInfinity;
            ASSERT_EQ(s[lane][m][n], x) << i << ' ' << j << ' ' << shows_all;
            ASSERT_EQ(ds[lane][m][n / 2][n % 2], n % 2 ? 0 : expected(kHead, i, j, 5, true)) << i << ' ' << j;
            hidden += x == -kInfinity;
          }
    }
  }
  EXPECT_GT(hidden, 500);
}

TEST(CudaScoreStep, GivesEveryPairOfKeyRowsItsOwnValues) {
  expect_keys<8>();
  expect_keys<16>();
  expect_keys<5>();
}

}  // namespace
}  // namespace tessera
