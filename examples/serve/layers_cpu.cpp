// The layers on the CPU, on threads that Tessera's calls share. The matrix products are plain loops in tiles: here an
// engine calls its BLAS.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "bf16.hpp"
#include "layers.hpp"
#include "model.hpp"

namespace serve {
namespace {

using Task = std::function<void(std::int32_t)>;

// Calls task(0) .. task(count - 1) on its threads and the caller's, and returns when all are done.
class ThreadPool {
 public:
  explicit ThreadPool(int threads) {
    for (int n = 1; n < threads; ++n) threads_.emplace_back([this](const std::stop_token& stop) { work(stop); });
  }
  ThreadPool(const ThreadPool&) = delete;
  ~ThreadPool() {
    for (std::jthread& thread : threads_) thread.request_stop();
  }

  void operator()(std::int32_t count, const Task& task) {
    {
      const std::lock_guard lock(mutex_);
      task_ = &task, count_ = count, next_ = 0, busy_ = threads_.size(), ++round_;
    }
    wake_.notify_all();
    take_part();
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void take_part() {
    for (std::int32_t n = next_++; n < count_; n = next_++) (*task_)(n);
  }

  void work(const std::stop_token& stop) {
    std::uint64_t round = 0;
    std::unique_lock lock(mutex_);
    while (wake_.wait(lock, stop, [&] { return round_ != round; })) {
      round = round_;
      lock.unlock();
      take_part();
      lock.lock();
      if (--busy_ == 0) idle_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::condition_variable idle_;
  const Task* task_ = nullptr;
  std::int32_t count_ = 0;
  std::atomic<std::int32_t> next_ = 0;
  std::size_t busy_ = 0;
  std::uint64_t round_ = 0;
  std::vector<std::jthread> threads_;  // last: they end before what they use
};

float load(const float* at) { return *at; }
float load(const std::uint16_t* at) { return from_bf16(*at); }
void store(float value, float* at) { *at = value; }
void store(float value, std::uint16_t* at) { *at = to_bf16(value); }

constexpr std::int64_t kTileRows = 4, kTileColumns = 64;

// One tile of a product, its sums in registers.
template <typename In, typename Out>
void product_tile(const In* in, std::int64_t depth, const float* weight, Out* out, std::int64_t columns,
                  std::int64_t rows, std::int64_t width, bool add) {
  float sum[kTileRows][kTileColumns] = {};
  for (std::int64_t i = 0; i < depth; ++i) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const float a = load(in + r * depth + i);
      for (std::int64_t c = 0; c < width; ++c) sum[r][c] += a * weight[i * columns + c];
    }
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < width; ++c) {
      Out* to = out + r * columns + c;
      store(add ? load(to) + sum[r][c] : sum[r][c], to);
    }
  }
}

class CpuLayers final : public Layers {
 public:
  CpuLayers() : Layers(tessera::cpu()), pool_(device().threads), executor_(tessera::make_executor(pool_)) {}

  const tessera::Executor& executor() const override { return executor_; }

  void* allocate(std::size_t bytes) override {
    return memory_.emplace_back(std::make_unique<std::byte[]>(bytes)).get();
  }
  void upload(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }

  void embed(const std::int32_t* tokens, const float* table, float* x, std::int64_t rows, std::int64_t dim) override {
    for (std::int64_t r = 0; r < rows; ++r) std::copy_n(table + tokens[r] * dim, dim, x + r * dim);
  }

  void rms_norm(const float* x, const std::int32_t* from, const float* gain, float* out, std::int64_t rows,
                std::int64_t dim) override {
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* row = x + (from ? from[r] : r) * dim;
      float squares = 0;
      for (std::int64_t i = 0; i < dim; ++i) squares += row[i] * row[i];
      const float factor = 1 / std::sqrt(squares / static_cast<float>(dim) + static_cast<float>(kNormEpsilon));
      for (std::int64_t i = 0; i < dim; ++i) out[r * dim + i] = gain[i] * row[i] * factor;
    }
  }

  void matmul(const Matrix& in, const float* weight, const Matrix& out, std::int64_t rows, bool add) override {
    if (in.dtype == tessera::float32 && out.dtype == tessera::float32) {
      product(static_cast<const float*>(in.data), in.columns, weight, static_cast<float*>(out.data), out.columns, rows,
              add);
    } else if (in.dtype == tessera::float32) {
      product(static_cast<const float*>(in.data), in.columns, weight, static_cast<std::uint16_t*>(out.data),
              out.columns, rows, add);
    } else {
      product(static_cast<const std::uint16_t*>(in.data), in.columns, weight, static_cast<float*>(out.data),
              out.columns, rows, add);
    }
  }

  void gate(const float* gate_up, float* out, std::int64_t rows, std::int64_t hidden) override {
    for (std::int64_t r = 0; r < rows; ++r) {
      const float *gates = gate_up + 2 * r * hidden, *up = gates + hidden;
      for (std::int64_t i = 0; i < hidden; ++i) out[r * hidden + i] = gates[i] / (1 + std::exp(-gates[i])) * up[i];
    }
  }

  void argmax(const float* logits, std::int32_t* token, std::int64_t rows, std::int64_t vocab) override {
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* row = logits + r * vocab;
      token[r] = static_cast<std::int32_t>(std::max_element(row, row + vocab) - row);
    }
  }

  void attention_begins() override { began_ = Clock::now(); }
  void attention_ends() override { seconds_ += std::chrono::duration<double>(Clock::now() - began_).count(); }
  double attention_seconds() override { return std::exchange(seconds_, 0.0); }

 private:
  using Clock = std::chrono::steady_clock;

  template <typename In, typename Out>
  void product(const In* in, std::int64_t depth, const float* weight, Out* out, std::int64_t columns, std::int64_t rows,
               bool add) {
    const std::int64_t down = (rows + kTileRows - 1) / kTileRows, across = (columns + kTileColumns - 1) / kTileColumns;
    pool_(static_cast<std::int32_t>(down * across), [&](std::int32_t n) {
      const std::int64_t row = n % down * kTileRows, column = n / down * kTileColumns;
      product_tile(in + row * depth, depth, weight + column, out + row * columns + column, columns,
                   std::min(kTileRows, rows - row), std::min(kTileColumns, columns - column), add);
    });
  }

  ThreadPool pool_;
  tessera::Executor executor_;
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  Clock::time_point began_;
  double seconds_ = 0;
};

}  // namespace

std::unique_ptr<Layers> make_cpu_layers() { return std::make_unique<CpuLayers>(); }

}  // namespace serve
