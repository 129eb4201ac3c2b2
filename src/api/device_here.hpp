// The device of a call that has no plan: the caller's, if it is this machine's, or this machine's CPU.
#pragma once

#include "core/isa.hpp"
#include "core/own_memory.hpp"
#include "core/status.hpp"
#include "core/validate.hpp"
#include "cpu/cpu.hpp"
#include "tessera/tessera.h"

namespace tessera::api {

// `given` may be NULL.
inline tessera_status device_here(const tessera_device* given, tessera_device& device) {
  if (given) {
    device = *given;
  } else {
    TESSERA_RETURN_IF_ERROR(cpu::detect_once(device));
  }
  TESSERA_RETURN_IF_ERROR(core::validate(device));
  if (device.backend == TESSERA_BACKEND_CUDA) return core::check_is_here(device);
  if (core::has_isa(cpu::best_isa(), device.isa)) return ok();
  return invalid("device: has %s, accepted this machine's CPU, which has %s", tessera_isa_name(device.isa),
                 tessera_isa_name(cpu::best_isa()));
}

}  // namespace tessera::api
