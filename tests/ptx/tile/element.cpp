#include "device_test.hpp"

namespace tessera::testing {
namespace {

// A pair, to its type and back; an element to memory and back.
DeviceTest of_type(const std::string& name, const std::string& dtype, uint32_t stored) {
  return {.name = "element_" + name,
          .header = "tessera/tile/fragment.cuh",
          .expected = {stored, word(1.5f), word(-2.25f), word(-2.25f)},
          .body = "constexpr Dtype kType = Dtype::" + dtype + R"(;
  if (t == 0) {
    alignas(8) __shared__ char memory[8];
    if constexpr (kType == Dtype::kFloat32) {
      *reinterpret_cast<float2*>(memory) = make_float2(1.5f, -2.25f);
      out[0] = __float_as_uint(1.5f);
    } else {
      *reinterpret_cast<uint32*>(memory) = out[0] = pack_pair<kType>(1.5f, -2.25f);
    }
    const float2 pair = load_pair<kType>(memory);
    out[1] = __float_as_uint(pair.x), out[2] = __float_as_uint(pair.y);
    store_element<kType>(memory, 0, load_element<kType>(memory, 1));
    out[3] = __float_as_uint(unpack_pair<kType>(*reinterpret_cast<RawPair<kType>*>(memory)).x);
  })"};
}

const DeviceTests kTests({
    of_type("f32", "kFloat32", word(1.5f)),
    of_type("f16", "kFloat16", half_pair(1.5f, -2.25f, false)),
    of_type("bf16", "kBFloat16", half_pair(1.5f, -2.25f, true)),
    {.name = "infinity",
     .header = "tessera/tile/fragment.cuh",
     .expected = {0x7f800000},
     .body = "if (t == 0) out[0] = __float_as_uint(infinity());"},
});

}  // namespace
}  // namespace tessera::testing
