// Elements of the three types, in registers and in memory, and named constants.
#pragma once

#include "tessera/ptx/device.cuh"
#include "tessera/ptx/math.cuh"

namespace tessera {

// Named constants; NVRTC lacks <numbers>.

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

TESSERA_DEVICE float infinity() { return __int_as_float(0x7f800000); }

// Elements of the three types, in registers and in memory.

// Packs two neighbouring elements of a row into 16 bits each.
template <Dtype kDtype>
TESSERA_DEVICE uint32 pack_pair(float low, float high) {
  static_assert(kDtype != Dtype::kFloat32, "float32 is not packed");
  return kDtype == Dtype::kFloat16 ? ptx::cvt_rn_f16x2(low, high) : ptx::cvt_rn_bf16x2(low, high);
}

// Two neighbouring elements in their storage type, and as numbers.
template <Dtype kDtype>
struct RawPairOf {
  using Type = uint32;
};
template <>
struct RawPairOf<Dtype::kFloat32> {
  using Type = float2;
};
template <Dtype kDtype>
using RawPair = typename RawPairOf<kDtype>::Type;

template <Dtype kDtype>
TESSERA_DEVICE float2 unpack_pair(const RawPair<kDtype>& pair) {
  if constexpr (kDtype == Dtype::kFloat32) {
    return pair;
  } else if constexpr (kDtype == Dtype::kFloat16) {
    return make_float2(ptx::cvt_f32_f16(static_cast<unsigned short>(pair)),
                       ptx::cvt_f32_f16(static_cast<unsigned short>(pair >> 16)));
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
}

// Loads two neighbouring elements.
template <Dtype kDtype>
TESSERA_DEVICE float2 load_pair(const char* at) {
  return unpack_pair<kDtype>(*reinterpret_cast<const RawPair<kDtype>*>(at));
}

template <Dtype kDtype>
TESSERA_DEVICE float load_element(const void* data, int64 index) {
  if constexpr (kDtype == Dtype::kFloat32) return static_cast<const float*>(data)[index];
  const unsigned short bits = static_cast<const unsigned short*>(data)[index];
  if constexpr (kDtype == Dtype::kFloat16) return ptx::cvt_f32_f16(bits);
  return __uint_as_float(static_cast<uint32>(bits) << 16);
}

template <Dtype kDtype>
TESSERA_DEVICE void store_element(void* data, int64 index, float x) {
  if constexpr (kDtype == Dtype::kFloat32) {
    static_cast<float*>(data)[index] = x;
  } else {
    static_cast<unsigned short*>(data)[index] = static_cast<unsigned short>(pack_pair<kDtype>(x, 0.0f));
  }
}

}  // namespace tessera
