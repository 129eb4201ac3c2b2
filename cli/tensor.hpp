// A tensor in the program's own memory, and its source.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shape.hpp"
#include "tessera/tessera.h"

namespace tessera::cli {

// Memory aligned to 64 bytes, uninitialised. Copies share it.
class Memory {
 public:
  Memory() = default;
  // Throws Failure naming `what` if there is not enough memory.
  Memory(std::int64_t size_bytes, const std::string& what);
  // Memory of another kind, such as a GPU's, with its deleter.
  Memory(std::shared_ptr<std::byte> data, std::int64_t size_bytes) : data_(std::move(data)), size_bytes_(size_bytes) {}

  std::byte* data() const { return data_.get(); }
  std::int64_t size_bytes() const { return size_bytes_; }

 private:
  std::shared_ptr<std::byte> data_;
  std::int64_t size_bytes_ = 0;
};

// Element types of files.
enum class Element {
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64,
  kInt32,
  kInt64,
  kBool,
  kUint8,
  kUint16,
  kInt8,
  kE4m3,
  kE5m2
};
const char* element_name(Element element);
std::int64_t element_bytes(Element element);

// A file's contents: contiguous, row-major.
struct FileTensor {
  std::string source;  // as the user would recognise it: "q (q.npy)", "--bias bias.npy"
  Element element = Element::kFloat32;
  Shape shape;
  Memory memory;

  std::int64_t elems() const;
};

// A tensor for the library.
struct Tensor {
  std::string source;
  tessera_dtype dtype = TESSERA_FLOAT32;
  Shape shape;                        // as the library sees it
  std::vector<std::int64_t> strides;  // in elements; row-major unless rearranged
  Memory memory;

  bool present() const { return !shape.empty(); }
  std::int64_t elems() const;
  tessera_layout layout() const;
  std::string describe() const;  // "q.npy: float32 [1, 128, 8, 64]"
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(memory.data());
  }
};

// A new tensor, contiguous, its elements not set.
Tensor make_tensor(std::string source, tessera_dtype dtype, Shape shape);

// Converts files' tensors for the library. Each throws WrongUse naming the source, its contents and the accepted types.
// 16-bit integers are bfloat16 bits if `sixteen_bit` says so, and refused otherwise.
Tensor as_floating(FileTensor file, bool sixteen_bit_is_bfloat16);
// q, k or v, which may have 8 bits. `dtype`: what it should hold, if given; uint8 is codes of the 8-bit float that it
// names, and uint16 bfloat16 bits.
Tensor as_sequence(FileTensor file, std::optional<tessera_dtype> dtype);
Tensor as_float32(FileTensor file);  // any floating type, converted
Tensor as_int32(FileTensor file);    // int32, or int64 within its range
Tensor as_int64(FileTensor file);
Tensor as_bool(FileTensor file);  // bool, or uint8 of 0 and 1

// Exchanges axes 1 and 2 of a rank-4 tensor's layout: [B, H, S, D] in memory seen as [B, S, H, D].
void view_heads_first(Tensor& tensor);

// A copy in another floating dtype, contiguous in memory order, with the same strides.
Tensor converted(const Tensor& tensor, tessera_dtype dtype);
double element_at(const Tensor& tensor, std::int64_t index);               // in memory order
void set_element(const Tensor& tensor, std::int64_t index, double value);  // in memory order

}  // namespace tessera::cli
