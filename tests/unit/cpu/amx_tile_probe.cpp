// The tile layer behind plain functions, compiled for the real tile registers and for their emulation, with the table
// named by TESSERA_AMX_PROBE.
#include "amx_tile_probe.hpp"

#include "cpu/amx_pack.hpp"

namespace tessera::cpu {
namespace {

void load_and_store(const void* in, std::int64_t in_stride, void* out, std::int64_t out_stride) {
  tiles_configure();
  tile_load<3>(in, in_stride);
  tile_store<3>(out, out_stride);
  tiles_release();
}

void zero(void* out) {
  tiles_configure();
  tile_load<5>(out, kTileRow_bytes);
  tile_zero<5>();
  tile_store<5>(out, kTileRow_bytes);
  tiles_release();
}

void multiply_add(float* c, const std::uint16_t* a, const std::uint16_t* b) {
  tiles_configure();
  tile_load<0>(c, kTileRow_bytes);
  tile_load<4>(a, kTileRow_bytes);
  tile_load<6>(b, kTileRow_bytes);
  tile_product<0, 4, 6>();
  tile_store<0>(c, kTileRow_bytes);
  tiles_release();
}

void multiply_add_rows(float* c, const std::uint16_t* a, const std::uint16_t* b, std::int64_t rows) {
  tiles_configure(rows);
  tile_load<1>(c, kTileRow_bytes);
  tile_load<3>(a, kTileRow_bytes);
  tile_load<7>(b, kTileRow_bytes);
  tile_product<1, 3, 7>();
  tile_store<1>(c, kTileRow_bytes);
  tiles_release();
}

void column_pairs(std::uint16_t* out, const std::uint16_t* const* rows, std::int64_t count, std::int64_t cols) {
  pack_column_pairs(reinterpret_cast<std::uint32_t*>(out), kBlockM, reinterpret_cast<const char* const*>(rows), count,
                    kBlockM, cols);
}

void transposed_rows(std::uint16_t* out, const std::uint16_t* const* rows, std::int64_t count, std::int64_t cols) {
  pack_transposed_rows(reinterpret_cast<char*>(out), 2 * kTile_bytes, reinterpret_cast<const char* const*>(rows), count,
                       cols);
}

void row_pairs(std::uint16_t* out, const std::uint16_t* const* rows, std::int64_t count, std::int64_t cols) {
  pack_row_pairs(reinterpret_cast<char*>(out), 2 * kTile_bytes, reinterpret_cast<const char* const*>(rows), count,
                 cols);
}

}  // namespace
}  // namespace tessera::cpu

extern const tessera::test::AmxProbe TESSERA_AMX_PROBE;
const tessera::test::AmxProbe TESSERA_AMX_PROBE = {
    tessera::cpu::load_and_store,    tessera::cpu::zero,         tessera::cpu::multiply_add,
    tessera::cpu::multiply_add_rows, tessera::cpu::column_pairs, tessera::cpu::transposed_rows,
    tessera::cpu::row_pairs,
};
