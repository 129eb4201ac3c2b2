#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

template <int kRegisters>
void setmaxnreg_inc() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
}
template <int kRegisters>
void setmaxnreg_dec() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
}

}  // namespace tessera::ptx
