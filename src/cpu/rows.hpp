// Moves rows of tensors between threads' ranks, on the CPU.
#pragma once

#include "core/exchange.hpp"

namespace tessera::cpu {

class HostRowMoves final : public core::RowMoves {
 public:
  tessera_status move(const core::RowsShape& shape, const core::Rows& from, const core::Rows& to, bool add,
                      void* stream) override;
  tessera_status fill(float* data, float value, int64_t count, void* stream) override;
  tessera_status write(const int32_t* values, int64_t count, int32_t* to, void* stream) override;
};

}  // namespace tessera::cpu
