// A family's decisions for a plan: its own plain struct, stored in the plan's bytes. A launch reads it and decides
// nothing.
#pragma once

#include <cstring>
#include <type_traits>

#include "tessera/tessera.h"

namespace tessera::cuda {

// Maximum for a family of forward kernels: mixed_sm90 stores its own decisions after those of another family.
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
