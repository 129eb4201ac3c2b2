#include "device_test.hpp"

namespace tessera::testing {
namespace {

// A tile of 16 rows and 32 columns of 16 bits, 16 words a row; `in` has rows of 20 words. 13 rows exist, with 60 bytes
// each.
constexpr int kRows = 16, kWords = 16, kStride = 20, kCount = 13;
const std::vector<uint32_t> kLoaded = words(kRows * kWords, [](int i) {
  return i / kWords < kCount && i % kWords < 15 ? static_cast<uint32_t>(i / kWords * kStride + i % kWords) : 0u;
});
const std::vector<uint32_t> kWhole =
    words(kRows * kWords, [](int i) { return static_cast<uint32_t>(i / kWords * kStride + i % kWords); });

DeviceTest load(const std::string& name, const std::vector<uint32_t>& expected, const std::string& call) {
  return {.name = name,
          .header = "tessera/tile/shared_tile.cuh",
          .in = numbered(kRows * kStride),
          .expected = expected,
          .body = R"(
  __shared__ SharedTile<Dtype::kBFloat16, 16, 32> s;
  const char* rows = reinterpret_cast<const char*>(in);
  )" + call + R"(
  ptx::cp_async_wait_all();
  __syncwarp();
  put_tile(out, s);)"};
}
// Rows of `out` are also 20 words apart: the gaps between them are unchanged.
DeviceTest store(const std::string& name, int count, int columns, const std::string& call) {
  return {.name = name,
          .header = "tessera/tile/shared_tile.cuh",
          .in = numbered(kRows * kWords),
          .expected = words(kRows * kStride,
                            [count, columns](int i) {
                              const bool there = i / kStride < count && i % kStride < columns / 2;
                              return there ? static_cast<uint32_t>(i / kStride * kWords + i % kStride) : 7u;
                            }),
          .fill = 7,
          .body = R"(
  __shared__ SharedTile<Dtype::kBFloat16, 16, 32> s;
  fill_tile(s, in);
  char* rows = reinterpret_cast<char*>(out);
  )" + call};
}

const DeviceTests kTests({
    load("load_tile", kLoaded, "load_tile<true, 32>(s, 13, 60, [&](int row) { return rows + row * 80; });"),
    load("load_tile_unaligned", kLoaded, "load_tile<false, 32>(s, 13, 60, [&](int row) { return rows + row * 80; });"),
    load("load_tile_strided", kLoaded, "load_tile_strided<true, 32>(s, 13, 60, rows, 80);"),
    load("load_tile_strided_full", kWhole, "load_tile_strided<true, 32>(s, 16, 64, rows, 80);"),
    load("load_tile_scattered", kLoaded,
         "load_tile_scattered<true, 32>(s, 13, 60, rows, [](int row) { return static_cast<int64>(row * 80); });"),
    store("store_rows", 13, 30, "store_rows<16>(s, 0, 13, 30, 1, [&](int row) { return rows + row * 80; });"),
    store("store_rows_unaligned", 13, 30, "store_rows<16>(s, 0, 13, 30, 0, [&](int row) { return rows + row * 80; });"),
    store("store_rows_strided", 16, 32, "store_rows_strided<16>(s, 0, 16, 32, 1, rows, 80);"),
});

}  // namespace
}  // namespace tessera::testing
