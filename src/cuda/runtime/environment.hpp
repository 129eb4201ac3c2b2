// The environment variables of the CUDA back end. No launch reads them: those that affect plans are read when a plan is
// made, the others when they are first needed.
#pragma once

#include <span>
#include <string>

namespace tessera::cuda {

struct EnvironmentVariable {
  const char* name;
  const char* meaning;
};

// This library's own variables, for `tessera info`.
std::span<const EnvironmentVariable> environment_variables();

// "" if the variable is not set, or if the program runs with more rights than its caller (setuid).
std::string environment_variable(const char* name);

inline constexpr const char* kCacheFolder = "TESSERA_CACHE_DIR";
inline constexpr const char* kGivenNvrtc = "TESSERA_NVRTC";
inline constexpr const char* kGivenNccl = "TESSERA_NCCL";
inline constexpr const char* kCudaGraphs = "TESSERA_CUDA_GRAPHS";
inline constexpr const char* kLineInfo = "TESSERA_LINEINFO";
inline constexpr const char* kBulkCopies = "TESSERA_FWD_SM80_BULK";
inline constexpr const char* kForcedTile = "TESSERA_FWD_SM90_TILE";
inline constexpr const char* kForcedFp8Tile = "TESSERA_FWD_SM90_FP8_TILE";
inline constexpr const char* kForcedSplits = "TESSERA_FWD_SM90_SPLITS";
inline constexpr const char* kForcedBackwardTile = "TESSERA_BWD_SM90_TILE";
inline constexpr const char* kFa1Keys = "TESSERA_FA1_KEYS";

}  // namespace tessera::cuda
