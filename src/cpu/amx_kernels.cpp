// The AMX kernels, only for bfloat16: compiled for the real tile registers and for their emulation
// (src/CMakeLists.txt), each of which exports one table.
#include "cpu/amx_backward.hpp"
#include "cpu/amx_decode.hpp"

#define TESSERA_JOIN_(a, b) a##b
#define TESSERA_JOIN(a, b) TESSERA_JOIN_(a, b)

namespace tessera::cpu {

const AmxKernelTable TESSERA_JOIN(kernels_, TESSERA_ISA_NAME) = {
    .block_m = kBlockM,
    .decode_keys = kAmxDecodeKeys,
    .tile_bytes = sizeof(Tile),
    .decode_row_bytes = sizeof(DecodeRow),
    .pack_keys = amx_pack_keys_item,
    .forward = amx_forward_item,
    .decode = amx_decode_item,
    .backward_preprocess = backward_preprocess_item,
    .backward = amx_backward_item,
    .backward_postprocess = backward_postprocess_item,
};

}  // namespace tessera::cpu
