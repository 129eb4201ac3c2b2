#pragma once

namespace tessera::ptx {

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

}  // namespace tessera::ptx
