// The steps of a plan, and plans as questions to a kernel family: a plan without steps, whose sizes are set. The keys
// that a step is asked to serve are then in `steps[0]`, and so are the chunks of a prefix, as num_splits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>

#include "core/candidate.hpp"
#include "tessera/tessera.h"

namespace tessera::core {

inline std::span<const tessera_plan_step> steps_of(const tessera_plan& plan) {
  return {plan.steps, static_cast<size_t>(plan.num_steps)};
}

// Appends a step of this family, for the keys that the plan asks about.
inline tessera_plan_step& add_step(tessera_plan& plan, const Candidate& family) {
  tessera_plan_step& step = plan.steps[plan.num_steps++];
  const int32_t keys = plan.steps[0].keys;
  step = {};
  step.keys = keys;
  set_family_name(step.family, family);
  step.isa = plan.device.isa;
  step.num_splits = 1;
  return step;
}

// A family's decisions for a step: a plain struct in the step's bytes.
template <class Config>
void keep_config(tessera_plan_step& step, const Config& config) {
  static_assert(std::is_trivially_copyable_v<Config> && sizeof(Config) <= sizeof step.config);
  std::memcpy(step.config, &config, sizeof config);
}
template <class Config>
Config config_of(const tessera_plan_step& step) {
  Config config;
  std::memcpy(&config, step.config, sizeof config);
  return config;
}

// The bytes of a program's copy that are in use.
inline size_t used_bytes(const tessera_plan_program& program) {
  const size_t text = static_cast<size_t>(std::max(program.text_bytes, 0));
  return offsetof(tessera_plan_program, text) + std::min((text + 8) / 8 * 8, sizeof program.text);
}

// Calls `part(offset, bytes)` for the parts of a plan that are in use, with this number of steps. The rest is 0.
template <class Part>
void for_each_used_part(const tessera_plan& plan, size_t steps, const Part& part) {
  constexpr size_t kDevice = offsetof(tessera_plan, device), kSteps = offsetof(tessera_plan, steps);
  part(size_t{0}, offsetof(tessera_plan, problem) + sizeof plan.problem);
  part(kDevice, kSteps - kDevice + steps * sizeof(tessera_plan_step));
  part(offsetof(tessera_plan, program), used_bytes(plan.program));
}

inline char* bytes_of(tessera_plan& plan) { return static_cast<char*>(static_cast<void*>(&plan)); }
inline const char* bytes_of(const tessera_plan& plan) {
  return static_cast<const char*>(static_cast<const void*>(&plan));
}

// Copies what is in use of `plan`, with this number of steps. The rest of `to` is not touched.
inline void copy_used(const tessera_plan& plan, size_t steps, tessera_plan& to) {
  for_each_used_part(plan, steps, [&](size_t offset, size_t bytes) {
    std::memcpy(bytes_of(to) + offset, bytes_of(plan) + offset, bytes);
  });
}

// The plan as a question: its problem, device and sizes, without steps. What is not in use stays uninitialised.
inline tessera_plan question_of(const tessera_plan& plan) {
  tessera_plan question;
  copy_used(plan, 0, question);
  question.num_steps = 0;
  question.steps[0] = {};
  return question;
}

// Empties the parts of a plan that are always in use, but for its problem and device.
inline void begin_plan(tessera_plan& plan) {
  plan.seal = 0, plan.kernel = TESSERA_KERNEL_AUTO;
  constexpr size_t kBatch = offsetof(tessera_plan, batch);
  std::memset(bytes_of(plan) + kBatch, 0, offsetof(tessera_plan, steps) - kBatch);
  plan.steps[0] = {};
  plan.program.text_bytes = 0;
  std::memset(bytes_of(plan) + offsetof(tessera_plan, program), 0, used_bytes(plan.program));
}

// `plan` with all of its bytes: those that are not in use become 0.
inline void store_plan(const tessera_plan& plan, tessera_plan& to) {
  const size_t steps = static_cast<size_t>(plan.num_steps);
  copy_used(plan, steps, to);
  std::memset(to.problem_reserved, 0, sizeof to.problem_reserved);
  const size_t rest = offsetof(tessera_plan, steps) + steps * sizeof(tessera_plan_step);
  std::memset(bytes_of(to) + rest, 0, offsetof(tessera_plan, program) - rest);
  const size_t text = offsetof(tessera_plan, program) + used_bytes(plan.program);
  std::memset(bytes_of(to) + text, 0, sizeof to - text);
}

}  // namespace tessera::core
