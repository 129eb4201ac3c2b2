#include "core/seal.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "core/status.hpp"
#include "core/steps.hpp"

namespace tessera::core {
namespace {

static_assert(sizeof(tessera_plan) == TESSERA_PLAN_BYTES && sizeof(tessera_device) == TESSERA_DEVICE_BYTES,
              "plans and devices keep their sizes: a new member takes from `reserved`");
static_assert(sizeof(tessera_plan_step) % 8 == 0 && offsetof(tessera_plan, problem) == 24);
static_assert(offsetof(tessera_plan, device) == offsetof(tessera_plan, problem) + TESSERA_PLAN_PROBLEM_BYTES);

// Hashes lines of eight words, one word of each lane, so that the multiplications overlap. Each step is a bijection of
// the word and of the lane. Most lines of a problem are zeros and are skipped; with each of the others, its number is
// hashed.
class Hash {
 public:
  void add(const void* data, size_t bytes) {
    const char* from = static_cast<const char*>(data);
    std::array<uint64_t, kLanes> lanes = lanes_;
    uint64_t line = line_;
    for (; bytes >= kLanes * 8; bytes -= kLanes * 8, from += kLanes * 8) {
      ++line;
      uint64_t any = 0;
      for (size_t lane = 0; lane < kLanes; ++lane) any |= word(from + 8 * lane);
      if (any == 0) continue;
      for (size_t lane = 0; lane < kLanes; ++lane) mix(lanes[lane], word(from + 8 * lane));
      mix(lanes[0], line);
    }
    for (size_t lane = 0; 8 * lane < bytes; ++lane) mix(lanes[lane], word(from + 8 * lane));
    lanes_ = lanes, line_ = line;
  }
  uint64_t result() const {
    uint64_t all = 0;
    for (const uint64_t lane : lanes_) {
      mix(all, lane);
      all ^= all >> 32;
    }
    return all;
  }

 private:
  static constexpr size_t kLanes = 8;
  static uint64_t word(const char* from) {
    uint64_t value = 0;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  static void mix(uint64_t& lane, uint64_t value) {
    constexpr uint64_t kFactor = 0x9E3779B97F4A7C15u;  // 2^64 / the golden ratio, odd
    lane = (lane ^ value) * kFactor;
  }

  std::array<uint64_t, kLanes> lanes_ = {1, 2, 3, 4, 5, 6, 7, 8};
  uint64_t line_ = 0;  // lines so far
};

}  // namespace

uint64_t seal_of(const tessera_plan& plan) {
  constexpr size_t kVersion = offsetof(tessera_plan, version);  // what is before it is not hashed
  const size_t steps = static_cast<size_t>(std::clamp(plan.num_steps, 0, TESSERA_PLAN_MAX_STEPS));
  Hash hash;
  for_each_used_part(plan, steps, [&](size_t offset, size_t bytes) {
    const size_t begin = std::max(offset, kVersion);
    hash.add(bytes_of(plan) + begin, offset + bytes - begin);
  });
  return hash.result();
}

tessera_status check_plan(const tessera_plan* plan) {
  if (!plan) return invalid("plan: NULL, must point to a tessera_plan");
  if (plan->struct_size != sizeof *plan) {
    return invalid("plan: struct_size %zu, accepted %zu: a plan that tessera_make_plan filled in", plan->struct_size,
                   sizeof *plan);
  }
  if (plan->version != TESSERA_VERSION) {
    return invalid("plan: made by version %d.%d.%d, accepted one that this version made: %s", plan->version / 10000,
                   plan->version / 100 % 100, plan->version % 100, tessera_version());
  }
  if (plan->seal != seal_of(*plan)) {
    return invalid(
        "plan: changed since tessera_make_plan filled it in (seal %016llx), accepted as it was; change the problem or "
        "the "
        "device, and plan again",
        static_cast<unsigned long long>(plan->seal));
  }
  return ok();
}

}  // namespace tessera::core
