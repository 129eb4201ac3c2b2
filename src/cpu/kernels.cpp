// The CPU kernels of one instruction set. This file is compiled once for each (src/CMakeLists.txt), and exports one
// table.
#include "cpu/append.hpp"
#include "cpu/backward.hpp"
#include "cpu/combine.hpp"
#include "cpu/decode.hpp"
#include "cpu/forward.hpp"

#define TESSERA_JOIN_(a, b) a##b
#define TESSERA_JOIN(a, b) TESSERA_JOIN_(a, b)

namespace tessera::cpu {
namespace {
constexpr Op kBestOp = kHasDot ? Op::kDot : Op::kFma;
}  // namespace

const KernelTable TESSERA_JOIN(kernels_, TESSERA_ISA_NAME) = {
    .lanes = kLanes,
    .block_m = kBlockM,
    .has_dot = kHasDot,
    .decode_rows = kDecodeRows,
    .decode_keys = kDecodeBlockKeys,
    .tile_bytes = sizeof(Tile),
    .decode_row_bytes = sizeof(DecodeRow),
    .forward = forward_item<Op::kFma>,
    .forward_dot = forward_item<kBestOp>,
    .decode = decode_item<Op::kFma>,
    .decode_dot = decode_item<kBestOp>,
    .backward_preprocess = backward_preprocess_item,
    .backward = backward_item<Op::kFma>,
    .backward_dot = backward_item<kBestOp>,
    .backward_postprocess = backward_postprocess_item,
    .combine = combine_rows,
    .rotate_token = rotate_token,
    .quantize_token = quantize_token,
};

}  // namespace tessera::cpu
