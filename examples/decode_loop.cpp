// An engine's decoding loop: keys and values in a paged cache, a batch of sequences of different lengths, one new token
// each a step. The plan is made once, for the most that the cache can hold, and serves every step.
//
//   c++ -std=c++20 decode_loop.cpp $(pkg-config --cflags --libs tessera) -o decode_loop && ./decode_loop
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <tessera/tessera.hpp>
#include <vector>

namespace {

constexpr std::int64_t B = 3, Hq = 8, Hkv = 2, D = 64;
constexpr std::int64_t kPageSize = 16, kPages = 64, kMaxPages = 16;  // of the pool; of one sequence
constexpr std::int64_t kRow = Hkv * D;                               // elements of one key, all KV heads

// Pages of keys and values, and the pages of each sequence.
class PagedCache {
 public:
  PagedCache() : keys_(kPages * kPageSize * kRow), values_(keys_.size()), table_(B * kMaxPages), lengths_(B) {
    for (std::int32_t page = kPages - 1; page >= 0; --page) free_.push_back(page);
  }

  // The key and value of a new token at the end of sequence b. Rows are [Hkv, D].
  void append(std::int64_t b, std::span<const float> key, std::span<const float> value) {
    const std::int64_t position = lengths_[b]++;
    std::int32_t& page = table_[b * kMaxPages + position / kPageSize];
    if (position % kPageSize == 0) {
      page = free_.back();
      free_.pop_back();
    }
    const std::int64_t row = page * kPageSize + position % kPageSize;
    std::ranges::copy(key, keys_.begin() + row * kRow);
    std::ranges::copy(value, values_.begin() + row * kRow);
  }

  const float* keys() const { return keys_.data(); }
  const float* values() const { return values_.data(); }
  const std::int32_t* table() const { return table_.data(); }
  const std::int32_t* lengths() const { return lengths_.data(); }

 private:
  std::vector<float> keys_, values_;           // [kPages, kPageSize, Hkv, D]
  std::vector<std::int32_t> table_, lengths_;  // [B, kMaxPages], [B]
  std::vector<std::int32_t> free_;
};

std::vector<float> draw(std::int64_t size, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(size));
  for (float& value : values) value = normal(random);
  return values;
}

}  // namespace

int main() try {
  tessera::Problem problem;
  problem.q = problem.o = tessera::layout(tessera::float32, {B, 1, Hq, D});
  problem.k = problem.v = tessera::layout(tessera::float32, {kPages, kPageSize, Hkv, D});
  problem.page_table = tessera::layout(tessera::int32, {B, kMaxPages});
  problem.seqused_k = tessera::layout(tessera::int32, {B});  // read at each call: lengths are not part of the plan
  problem.causal = true;
  const tessera::Plan plan = tessera::plan(problem);
  std::vector<std::byte> workspace(tessera::workspace_bytes(plan));
  std::printf("%s", tessera::describe(plan).c_str());

  std::mt19937 random(1);
  PagedCache cache;
  std::vector<std::vector<float>> keys(B), values(B);  // the same without pages, for the comparison below
  std::vector<float> q, o(B * Hq * D);
  const auto append = [&](std::int64_t b) {
    const std::vector<float> key = draw(kRow, random), value = draw(kRow, random);
    cache.append(b, key, value);
    keys[b].insert(keys[b].end(), key.begin(), key.end());
    values[b].insert(values[b].end(), value.begin(), value.end());
  };

  for (std::int64_t b = 0; b < B; ++b) {
    for (std::int64_t prompt = 0; prompt < 5 + 40 * b; ++prompt) append(b);
  }
  constexpr int kSteps = 32;
  for (int step = 0; step < kSteps; ++step) {
    for (std::int64_t b = 0; b < B; ++b) append(b);
    q = draw(B * Hq * D, random);
    tessera::forward(plan,
                     {.q = q.data(),
                      .k = cache.keys(),
                      .v = cache.values(),
                      .o = o.data(),
                      .seqused_k = cache.lengths(),
                      .page_table = cache.table()},
                     workspace);
  }

  // The last step, one sequence at a time over contiguous keys.
  double largest = 0;
  for (std::int64_t b = 0; b < B; ++b) {
    const std::int64_t length = cache.lengths()[b];
    tessera::Problem one;
    one.q = one.o = tessera::layout(tessera::float32, {1, 1, Hq, D});
    one.k = one.v = tessera::layout(tessera::float32, {1, length, Hkv, D});
    const tessera::Plan contiguous = tessera::plan(one);
    workspace.resize(std::max(workspace.size(), tessera::workspace_bytes(contiguous)));
    std::vector<float> expected(Hq * D);
    tessera::forward(contiguous,
                     {.q = q.data() + b * Hq * D, .k = keys[b].data(), .v = values[b].data(), .o = expected.data()},
                     workspace);
    for (std::int64_t i = 0; i < Hq * D; ++i) {
      largest = std::max(largest, std::abs(static_cast<double>(expected[i]) - o[b * Hq * D + i]));
    }
  }
  std::printf("\n%d steps; largest difference to contiguous keys %.2g\n", kSteps, largest);
  return largest < 1e-5 ? 0 : 1;
} catch (const tessera::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
