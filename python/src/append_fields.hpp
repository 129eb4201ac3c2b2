// The tensors of an append by their names in Python, for its two callers: Python's arrays and XLA's buffers.
#pragma once

#include "tessera/tessera.h"

namespace tessera::python {

struct AppendField {
  const char* name;
  tessera_tensor tessera_append_call::*tensor;
  bool floating;  // dtypes float32, float16 and bfloat16; otherwise int32
  bool written;
};

inline constexpr AppendField kAppendFields[] = {
    {"k", &tessera_append_call::k, true, false},
    {"v", &tessera_append_call::v, true, false},
    {"k_cache", &tessera_append_call::k_cache, true, true},
    {"v_cache", &tessera_append_call::v_cache, true, true},
    {"seqused_k", &tessera_append_call::seqused_k, false, false},
    {"cu_seqlens", &tessera_append_call::cu_seqlens, false, false},
    {"page_table", &tessera_append_call::page_table, false, false},
    {"q", &tessera_append_call::q, true, false},  // written if q_out is absent
    {"q_out", &tessera_append_call::q_out, true, true},
    {"cos", &tessera_append_call::cos, true, false},
    {"sin", &tessera_append_call::sin, true, false},
    {"positions_q", &tessera_append_call::positions_q, false, false},
    {"positions_k", &tessera_append_call::positions_k, false, false},
    {"dropped", &tessera_append_call::dropped, false, true},
};

}  // namespace tessera::python
