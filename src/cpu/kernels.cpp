// The CPU kernels of one instruction set. This file is compiled once for each (src/CMakeLists.txt), and exports one
// table.
#include "cpu/append.hpp"
#include "cpu/backward.hpp"
#include "cpu/combine.hpp"
#include "cpu/decode.hpp"
#if defined(TESSERA_COMPILE_AVX512_BF16)
#include "cpu/decode_codes.hpp"
#endif
#include "cpu/forward.hpp"

#define TESSERA_JOIN_(a, b) a##b
#define TESSERA_JOIN(a, b) TESSERA_JOIN_(a, b)

namespace tessera::cpu {

#if defined(TESSERA_COMPILE_AVX512)
void avx512_forward(const Params& p, int64_t item, char* scratch) { forward_item<Op::kFma>(p, item, scratch); }
void avx512_decode(const Params& p, int64_t item, char* scratch) { decode_item<Op::kFma>(p, item, scratch); }
void avx512_backward(const Params& p, int64_t item, char* scratch) { backward_item<Op::kFma>(p, item, scratch); }
#endif
#if defined(TESSERA_COMPILE_AVX512) || defined(TESSERA_COMPILE_AVX512_BF16)
#define TESSERA_FMA_KERNEL(name) avx512_##name
#else
#define TESSERA_FMA_KERNEL(name) name##_item<Op::kFma>
#endif
#if defined(TESSERA_HAS_DOT)
#define TESSERA_BEST_KERNEL(name) name##_item<Op::kDot>
#else
#define TESSERA_BEST_KERNEL(name) TESSERA_FMA_KERNEL(name)
#endif

const KernelTable TESSERA_JOIN(kernels_, TESSERA_ISA_NAME) = {
    .lanes = kLanes,
    .block_m = kBlockM,
    .has_dot = kHasDot,
    .decode_rows = kDecodeRows,
    .decode_keys = kDecodeBlockKeys,
    .tile_bytes = sizeof(Tile),
    .decode_row_bytes = sizeof(DecodeRow),
    .forward = TESSERA_FMA_KERNEL(forward),
    .forward_dot = TESSERA_BEST_KERNEL(forward),
    .decode = TESSERA_FMA_KERNEL(decode),
    .decode_dot = TESSERA_BEST_KERNEL(decode),
#if defined(TESSERA_COMPILE_AVX512_BF16)
    .decode_codes = decode_codes_item,
#endif
    .backward_preprocess = backward_preprocess_item,
    .backward = TESSERA_FMA_KERNEL(backward),
    .backward_dot = TESSERA_BEST_KERNEL(backward),
    .backward_postprocess = backward_postprocess_item,
    .combine = combine_rows,
    .rotate_token = rotate_token,
    .quantize_token = quantize_token,
};

}  // namespace tessera::cpu
