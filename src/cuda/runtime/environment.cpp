#include "cuda/runtime/environment.hpp"

#include <cstdlib>

namespace tessera::cuda {
namespace {

constexpr EnvironmentVariable kVariables[] = {
    {kCacheFolder, "the folder of compiled kernels"},
    {kGivenNvrtc, "the compiler, or its folder"},
    {kGivenNccl, "the library of messages between ranks"},
    {kCudaGraphs, "0: launches one by one; first: as a graph from the first call on"},
    {kLineInfo, "1: kernels carry line numbers"},
    {kBulkCopies, "0: plans whose mma.sync forward kernels take no bulk copies"},
    {kForcedTile, "the tile of plans for fwd_sm90"},
    {kForcedFp8Tile, "the tile of plans for fwd_sm90_fp8"},
    {kForcedSplits, "the number of parts of the keys of plans for fwd_sm90"},
    {kForcedBackwardTile, "the tile of plans for bwd_sm90"},
    {kFa1Keys, "keys of a tile of plans for fwd_fa1: 32, 64, 128 or 256"},
};

}  // namespace

std::span<const EnvironmentVariable> environment_variables() { return kVariables; }

std::string environment_variable(const char* name) {
  const char* const value = secure_getenv(name);
  return value ? value : "";
}

}  // namespace tessera::cuda
