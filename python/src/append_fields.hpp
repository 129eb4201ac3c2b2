// The tensors of an append by their names in Python, for its two callers: Python's arrays and XLA's buffers.
#pragma once

#include "tessera/tessera.h"

namespace tessera::python {

struct AppendField {
  const char* name;
  tessera_tensor tessera_append_call::*tensor;
  const char* dtypes;  // as an error lists them
  bool written;
};

inline constexpr const char *kFloats = "float32, float16 or bfloat16", *kIndices = "int32",
                            *kCache = "that of k, float8_e4m3, float8_e5m2 or int8";
inline constexpr AppendField kAppendFields[] = {
    {"k", &tessera_append_call::k, kFloats, false},
    {"v", &tessera_append_call::v, kFloats, false},
    {"k_cache", &tessera_append_call::k_cache, kCache, true},
    {"v_cache", &tessera_append_call::v_cache, kCache, true},
    {"seqused_k", &tessera_append_call::seqused_k, kIndices, false},
    {"cu_seqlens", &tessera_append_call::cu_seqlens, kIndices, false},
    {"page_table", &tessera_append_call::page_table, kIndices, false},
    {"q", &tessera_append_call::q, kFloats, false},  // written if q_out is absent
    {"q_out", &tessera_append_call::q_out, kFloats, true},
    {"cos", &tessera_append_call::cos, kFloats, false},
    {"sin", &tessera_append_call::sin, kFloats, false},
    {"positions_q", &tessera_append_call::positions_q, kIndices, false},
    {"positions_k", &tessera_append_call::positions_k, kIndices, false},
    {"dropped", &tessera_append_call::dropped, kIndices, true},
    {"k_descale", &tessera_append_call::k_descale, "float32", false},  // written with compute_scales
    {"v_descale", &tessera_append_call::v_descale, "float32", false},
};

}  // namespace tessera::python
