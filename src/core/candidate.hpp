// The candidates that may execute a plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/tessera.h"

namespace tessera::core {

struct Candidate {
  const char* name;                                 // of the family
  int32_t kernel;                                   // its tessera_kernel; AUTO if it has none
  std::string (*refuse)(const tessera_plan& plan);  // empty if it supports the problem; sizes are set
  void (*configure)(tessera_plan& plan);            // for a supported problem: fills in what will run
  double (*estimate_us)(
      const tessera_plan& plan);  // for a supported problem: how long a call would take, from its own table
  bool for_comparison = false;    // chosen only if requested by name
};

// The family that a device requests by name or number; "" if it requests none.
inline std::string_view asked_family(const tessera_device& device) {
  if (device.family[0] != '\0') return device.family;
  return device.kernel == TESSERA_KERNEL_AUTO ? std::string_view() : tessera_kernel_name(device.kernel);
}
inline bool is_asked(const tessera_device& device, const Candidate& candidate) {
  return asked_family(device) == candidate.name;
}

// Writes a family's name into a member of 32 bytes, whose rest becomes 0.
inline void set_family_name(char (&name)[32], const Candidate& candidate) {
  size_t length = 0;
  for (char& to : name) {
    to = candidate.name[length];
    if (to != '\0') ++length;
  }
}

// Enters the family into what has its name and its number: a plan, or a device that asks for it.
template <class Named>
void set_family(Named& named, const Candidate& candidate) {
  named.kernel = candidate.kernel;
  set_family_name(named.family, candidate);
}

}  // namespace tessera::core
