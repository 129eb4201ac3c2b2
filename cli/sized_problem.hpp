// A problem of given sizes without memory, for planning only.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>

#include "core/fields.hpp"
#include "tessera/tessera.h"

namespace tessera::cli {

struct ProblemSizes {
  std::int64_t batch = 1, seqlen_q = 0, heads_q = 8, head_dim = 64;
  std::optional<std::int64_t> seqlen_k, heads_kv, head_dim_v, page_size;  // if not given: as q's; no pages
  tessera_dtype dtype = TESSERA_FLOAT32;
  std::optional<tessera_dtype> kv_dtype;  // of k and v; if not given: as q's
  tessera_direction direction = TESSERA_FORWARD;
  bool packed = false;
  std::array<bool, core::kNumTensors> with{};  // the optional tensors that are present

  bool& operator[](const core::TensorField& field) { return with[&field - core::kTensorFields]; }
  bool operator[](const core::TensorField& field) const { return with[&field - core::kTensorFields]; }
};

// set_options sets the options that are not tensors. Throws WrongUse naming the flags of `tessera plan`.
tessera_problem problem_of(const ProblemSizes& sizes, const std::function<void(tessera_problem&)>& set_options);

}  // namespace tessera::cli
