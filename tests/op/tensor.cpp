#include "tensor.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>

#include "numbers.hpp"

namespace tessera::testing {

Tensor::Tensor(int32_t dtype, std::vector<int64_t> shape, const Placement& placement) {
  layout_.dtype = dtype;
  layout_.rank = static_cast<int32_t>(shape.size());
  std::ranges::copy(shape, layout_.shape);
  std::vector<int> order = placement.order;
  if (order.empty()) {
    order.resize(shape.size());
    std::iota(order.begin(), order.end(), 0);
  }
  const int64_t gap = order.empty() || order.back() == placement.repeated_dim ? 0 : placement.gap;
  int64_t elements = 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    if (*dim == placement.repeated_dim) continue;
    layout_.strides[*dim] = elements;
    elements *= shape[*dim];
    if (dim == order.rbegin()) elements += gap;
  }
  const auto element_bytes = static_cast<int64_t>(tessera_dtype_bytes(dtype));
  // One element beyond the guard: aligned to the element's size only.
  const int64_t lead_bytes = kGuardBytes + (placement.gap ? element_bytes : 0);
  // The gap after the very last row is not the caller's memory either.
  const int64_t data_bytes = std::max<int64_t>(0, elements - gap) * element_bytes;
  storage_bytes_ = lead_bytes + data_bytes + kGuardBytes;
  // Not std::make_shared, whose counts would lie beside the data, where the address sanitizer wants its red zone.
  storage_.reset(new std::byte[static_cast<size_t>(std::max<int64_t>(storage_bytes_, 1))]());
  origin_ = storage_.get() + lead_bytes;
  if (const int dim = placement.reversed_dim; dim >= 0 && shape[dim] > 0) {
    origin_ += (shape[dim] - 1) * layout_.strides[dim] * element_bytes;
    layout_.strides[dim] *= -1;
  }
  poison();
}

int64_t Tensor::size() const {
  return std::accumulate(layout_.shape, layout_.shape + layout_.rank, int64_t{1}, std::multiplies<>());
}

template <class F>
void Tensor::each_element(F f) const {
  const int64_t count = size();
  const auto element_bytes = static_cast<int64_t>(tessera_dtype_bytes(layout_.dtype));
  int64_t index[TESSERA_MAX_RANK] = {};
  int64_t offset = 0;
  for (int64_t n = 0; n < count; ++n) {
    f(n, origin_ + offset * element_bytes);
    for (int dim = layout_.rank - 1; dim >= 0; --dim) {
      offset += layout_.strides[dim];
      if (++index[dim] < layout_.shape[dim]) break;
      offset -= layout_.strides[dim] * layout_.shape[dim];
      index[dim] = 0;
    }
  }
}

void Tensor::poison() { std::memset(storage_.get(), 0xFF, storage_bytes_); }

void Tensor::store(const std::vector<double>& values) {
  each_element([&](int64_t n, std::byte* element) { encode(layout_.dtype, values[n], element); });
}

std::vector<double> Tensor::load() const {
  std::vector<double> values(present() ? size() : 0);
  if (present()) each_element([&](int64_t n, const std::byte* element) { values[n] = decode(layout_.dtype, element); });
  return values;
}

std::vector<std::byte> Tensor::bytes() const { return {storage_.get(), storage_.get() + storage_bytes_}; }

bool Tensor::unharmed_outside() const {
  if (!present()) return true;
  std::vector<std::byte> bytes = this->bytes();
  const size_t element_bytes = tessera_dtype_bytes(layout_.dtype);
  each_element([&](int64_t, const std::byte* element) {
    std::memset(bytes.data() + (element - storage_.get()), 0xFF, element_bytes);
  });
  return std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0xFF}; });
}

std::vector<char> Tensor::untouched() const {
  std::vector<char> untouched(present() ? size() : 0);
  const size_t element_bytes = tessera_dtype_bytes(layout_.dtype);
  const auto poisoned = [](std::byte byte) { return byte == std::byte{0xFF}; };
  if (present()) {
    each_element([&](int64_t n, const std::byte* element) {
      untouched[n] = std::all_of(element, element + element_bytes, poisoned);
    });
  }
  return untouched;
}

Tensor Tensor::slice(int dim, int64_t start, int64_t count) const {
  Tensor part = *this;
  if (!present()) return part;
  part.layout_.shape[dim] = count;
  part.origin_ += start * layout_.strides[dim] * static_cast<int64_t>(tessera_dtype_bytes(layout_.dtype));
  return part;
}

Tensor Tensor::at(int64_t index) const {
  Tensor part = slice(0, index, 1);
  --part.layout_.rank;
  std::copy_n(layout_.shape + 1, part.layout_.rank, part.layout_.shape);
  std::copy_n(layout_.strides + 1, part.layout_.rank, part.layout_.strides);
  return part;
}

}  // namespace tessera::testing
