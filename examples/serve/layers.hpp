// An engine's device functions beside attention: memory, and a model's other layers. One implementation for each
// device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <tessera/tessera.hpp>

namespace serve {

// Rows of float32 or bfloat16, one after another.
struct Matrix {
  tessera::DType dtype;
  std::int64_t columns;
  void* data;
};

class Layers {
 public:
  explicit Layers(const tessera::Device& device) : device_(device) {}
  Layers(const Layers&) = delete;
  virtual ~Layers() = default;

  const tessera::Device& device() const { return device_; }
  // Where Tessera's calls go: the threads or the stream of the other layers.
  virtual const tessera::Executor& executor() const = 0;

  // Zeroed memory, freed with *this.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
  virtual void download(void* to, const void* from, std::size_t bytes) = 0;  // waits for all earlier work

  // x [rows, dim] = table[tokens]
  virtual void embed(const std::int32_t* tokens, const float* table, float* x, std::int64_t rows, std::int64_t dim) = 0;
  // out [rows, dim] = gain * x / rms(x), of rows 0 .. rows - 1 of x, or of the rows that `from` [rows] names
  virtual void rms_norm(const float* x, const std::int32_t* from, const float* gain, float* out, std::int64_t rows,
                        std::int64_t dim) = 0;
  // out [rows, M] = in [rows, N] weight [N, M]; add: out (float32) += that
  virtual void matmul(const Matrix& in, const float* weight, const Matrix& out, std::int64_t rows,
                      bool add = false) = 0;
  // out [rows, hidden] = silu(gate) * up, the halves of gate_up [rows, 2 hidden]
  virtual void gate(const float* gate_up, float* out, std::int64_t rows, std::int64_t hidden) = 0;
  // token [rows]: the column of the largest of each row's logits [rows, vocab], the first among equals
  virtual void argmax(const float* logits, std::int32_t* token, std::int64_t rows, std::int64_t vocab) = 0;

  // Marks around Tessera's calls, and the seconds between them since the last query, after a download.
  virtual void attention_begins() = 0;
  virtual void attention_ends() = 0;
  virtual double attention_seconds() = 0;

  // Whether repeat() records: then work may depend on a step's contents only through memory.
  virtual bool records() const { return false; }
  // Work that is the same every time: a GPU records it as a graph and replays the graph.
  virtual void repeat(const std::function<void()>& work) { work(); }

 private:
  tessera::Device device_;
};

std::unique_ptr<Layers> make_cpu_layers();
// For GPU 0. Throws tessera::Error (unsupported) if there is none.
std::unique_ptr<Layers> make_cuda_layers();

}  // namespace serve
