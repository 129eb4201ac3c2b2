#include "device_test.hpp"

namespace tessera::testing {
namespace {

// Four columns of a row and a fifth, reversed, from memory to numbers and back.
DeviceTest of_type(const std::string& name, const std::string& dtype) {
  return {.name = "columns_" + name,
          .header = "tessera/tile/columns.cuh",
          .expected = {word(-4.0f), word(3.5f), word(-2.25f), word(1.5f), word(7.0f)},
          .body = "constexpr Dtype kType = Dtype::" + dtype + R"(;
  if (t == 0) {
    alignas(16) __shared__ char from[32], to[32];
    const float values[5] = {1.5f, -2.25f, 3.5f, -4.0f, 7.0f};
    for (int n = 0; n < 5; ++n) store_element<kType>(from, n, values[n]);
    float x[4], turned[4];
    unpack_columns(load_columns<kType, 4>(from, 0), x);
    for (int n = 0; n < 4; ++n) turned[n] = x[3 - n];
    RawColumns<kType, 4> raw;
    pack_columns(turned, raw);
    store_columns<kType, 4>(to, 0, raw);
    store_columns<kType, 1>(to, 4, load_columns<kType, 1>(from, 4));
    for (int n = 0; n < 5; ++n) out[n] = __float_as_uint(load_element<kType>(to, n));
  })"};
}

const DeviceTests kTests({of_type("f32", "kFloat32"), of_type("f16", "kFloat16"), of_type("bf16", "kBFloat16")});

}  // namespace
}  // namespace tessera::testing
