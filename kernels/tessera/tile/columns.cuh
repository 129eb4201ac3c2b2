// Neighbouring columns of a row, loaded and stored by one access, as raw memory words and as numbers. Their address is
// a multiple of their total size.
#pragma once

#include "tessera/tile/fragment.cuh"

namespace tessera {

template <Dtype kDtype, int kWidth>
struct alignas(kWidth* dtype_bytes(kDtype)) RawColumns {
  RawPair<kDtype> pairs[kWidth / 2];
};
template <Dtype kDtype>
struct RawColumns<kDtype, 1> {
  float column = 0.0f;
};
template <Dtype kDtype, int kWidth>
TESSERA_DEVICE RawColumns<kDtype, kWidth> load_columns(const void* data, int64 index) {
  using Raw = RawColumns<kDtype, kWidth>;
  if constexpr (kWidth == 1) {
    return {load_element<kDtype>(data, index)};
  } else {
    return *reinterpret_cast<const Raw*>(static_cast<const char*>(data) + index * dtype_bytes(kDtype));
  }
}
template <Dtype kDtype, int kWidth>
TESSERA_DEVICE void store_columns(void* data, int64 index, const RawColumns<kDtype, kWidth>& raw) {
  if constexpr (kWidth == 1) {
    store_element<kDtype>(data, index, raw.column);
  } else {
    *reinterpret_cast<RawColumns<kDtype, kWidth>*>(static_cast<char*>(data) + index * dtype_bytes(kDtype)) = raw;
  }
}
template <Dtype kDtype, int kWidth>
TESSERA_DEVICE void unpack_columns(const RawColumns<kDtype, kWidth>& raw, float* x) {
  if constexpr (kWidth == 1) {
    x[0] = raw.column;
  } else {
#pragma unroll
    for (int n = 0; n < kWidth; n += 2) {
      const float2 pair = unpack_pair<kDtype>(raw.pairs[n / 2]);
      x[n] = pair.x, x[n + 1] = pair.y;
    }
  }
}
template <Dtype kDtype, int kWidth>
TESSERA_DEVICE void pack_columns(const float* x, RawColumns<kDtype, kWidth>& raw) {
  if constexpr (kWidth == 1) {
    raw.column = x[0];
  } else {
#pragma unroll
    for (int n = 0; n < kWidth; n += 2) {
      if constexpr (kDtype == Dtype::kFloat32) {
        raw.pairs[n / 2] = make_float2(x[n], x[n + 1]);
      } else {
        raw.pairs[n / 2] = pack_pair<kDtype>(x[n], x[n + 1]);
      }
    }
  }
}

}  // namespace tessera
