// Choice of the kernel, its tiles and its workspace: a pure function of a Problem and a Device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/problem.hpp"
#include "tessera/status.hpp"
#include "tessera/tessera.h"

namespace tessera {

// The device that a plan is made for: plain data that may be edited (fewer threads, a lower isa, a single kernel).
struct Device : tessera_device {
  Device() : tessera_device{} {}
  Device(const tessera_device& device) : tessera_device(device) {}  // NOLINT: the same plain data
};

// What a call will do: plain data, for any number of calls and threads. It may be copied, but not changed: execution
// refuses a modified plan. See tessera_plan for each member.
struct Plan : tessera_plan {
  Plan() : tessera_plan{} {}
  Plan(const tessera_plan& plan) : tessera_plan(plan) {}  // NOLINT: the same plain data
};

inline Status try_cpu(Device& device) { return tessera_device_cpu(&device); }

// This machine's CPU. Throws Error if TESSERA_ISA or TESSERA_NUM_THREADS asks for more than this machine supports.
inline Device cpu() {
  Device device;
  throw_if_error(try_cpu(device));
  return device;
}

inline Status try_cuda(std::int32_t ordinal, Device& device) { return tessera_device_cuda(ordinal, &device); }

// GPU number `ordinal`. Throws Error (unsupported) if there is no driver, no such GPU, or its compute capability is
// below 8.0.
inline Device cuda(std::int32_t ordinal = 0) {
  Device device;
  throw_if_error(try_cuda(ordinal, device));
  return device;
}

inline Status try_cuda_arch(std::int32_t arch, Device& device) { return tessera_device_cuda_arch(arch, &device); }

// A typical GPU of compute capability `arch`, 10 * major + minor, which need not be in this machine: for planning and
// compiling. Throws Error if `arch` is unknown.
inline Device cuda_arch(std::int32_t arch) {
  Device device;
  throw_if_error(try_cuda_arch(arch, device));
  return device;
}

// `plan` is unchanged unless the status is ok.
inline Status try_plan(const tessera_problem& problem, const tessera_device& device, Plan& plan) {
  return tessera_make_plan(&problem, &device, &plan);
}

// Throws Error: invalid_argument names the argument that breaks a rule, unsupported lists why each kernel refuses.
inline Plan plan(const tessera_problem& problem, const tessera_device& device) {
  Plan result;
  throw_if_error(try_plan(problem, device, result));
  return result;
}

// Plans for this machine's CPU, which is detected once, at the first such call.
inline Plan plan(const tessera_problem& problem) {
  Plan result;
  throw_if_error(tessera_make_plan(&problem, nullptr, &result));
  return result;
}

// Bytes of workspace that forward or backward needs, with any alignment and content.
inline std::size_t workspace_bytes(const tessera_plan& plan) { return tessera_workspace_bytes(&plan); }

namespace detail {
inline std::string text_of(const tessera_plan& plan, std::size_t (*write)(const tessera_plan*, char*, std::size_t)) {
  std::string text(write(&plan, nullptr, 0), '\0');
  write(&plan, text.data(), text.size() + 1);
  return text;
}
}  // namespace detail

// All kernel families of the library.
inline std::vector<tessera_family> families() {
  std::vector<tessera_family> all(static_cast<std::size_t>(tessera_num_families()));
  for (std::size_t n = 0; n < all.size(); ++n) throw_if_error(tessera_family_at(static_cast<std::int32_t>(n), &all[n]));
  return all;
}

// Each kernel's answer; of those that accept the one with the least estimate_us was chosen.
inline std::vector<tessera_candidate> candidates(const tessera_plan& plan) {
  std::vector<tessera_candidate> all(static_cast<std::size_t>(tessera_plan_num_candidates(&plan)));
  for (std::size_t n = 0; n < all.size(); ++n) {
    throw_if_error(tessera_plan_candidate(&plan, static_cast<std::int32_t>(n), &all[n]));
  }
  return all;
}

// The kernel launches of a call on a GPU, in order. aligned: see tessera_plan_num_launches.
inline std::vector<tessera_launch> launches(const tessera_plan& plan, bool aligned = true) {
  std::vector<tessera_launch> all(static_cast<std::size_t>(tessera_plan_num_launches(&plan, aligned)));
  for (std::size_t n = 0; n < all.size(); ++n) {
    throw_if_error(tessera_plan_launch(&plan, aligned, static_cast<std::int32_t>(n), &all[n]));
  }
  return all;
}

// The plan as several lines of text: the kernel and why, why each other candidate was refused, tiles, memory,
// arithmetic and traffic.
inline std::string describe(const tessera_plan& plan) { return detail::text_of(plan, tessera_plan_describe); }

// The same and every size, as one JSON object.
inline std::string json(const tessera_plan& plan) { return detail::text_of(plan, tessera_plan_json); }

}  // namespace tessera
