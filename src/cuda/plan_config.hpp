// What a family has decided for a plan: a plain struct of its own, kept in the plan's bytes. A launch reads it and decides nothing.
#pragma once

#include <cstring>
#include <type_traits>

#include "tessera/tessera.h"

namespace tessera::cuda {

// That a family of forward kernels fills at most: mixed_sm90 keeps its own decisions after another's.
inline constexpr size_t kForwardConfigBytes = 472;

template <class Config>
void keep_config(tessera_plan& plan, const Config& config) {
  static_assert(std::is_trivially_copyable_v<Config> && sizeof(Config) <= TESSERA_PLAN_CONFIG_BYTES);
  std::memcpy(plan.config, &config, sizeof config);
}

template <class Config>
Config config_of(const tessera_plan& plan) {
  Config config;
  std::memcpy(&config, plan.config, sizeof config);
  return config;
}

}  // namespace tessera::cuda
