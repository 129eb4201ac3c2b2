// One rank of several on a GPU: messages by NCCL, and moves of rows.
#pragma once

#include <memory>

#include "core/exchange.hpp"
#include "tessera/distributed.h"

namespace tessera::cuda {

std::unique_ptr<core::RowMoves> make_row_moves(const tessera_device& device);

// `device`: that of the communicator. UNSUPPORTED if this machine lacks NCCL, or has one that is too old.
tessera_status make_nccl_transport(ncclComm* comm, std::unique_ptr<core::Transport>& transport, tessera_device& device);

}  // namespace tessera::cuda
