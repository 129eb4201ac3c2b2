// Replaces the device's own header: a thread adds without atomics, and no kernel runs beside another.
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

inline void red_add_f32(float* global, float x) { *global += x; }
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

}  // namespace tessera::ptx
