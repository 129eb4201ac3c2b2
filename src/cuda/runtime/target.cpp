#include "cuda/runtime/target.hpp"

#include <algorithm>
#include <iterator>

namespace tessera::cuda {
namespace {

constexpr int32_t kArchs[] = {80, 86, 89, 90, 100, 120};
// Orin, and Thor before and after it was renumbered.
constexpr int32_t kIntegrated[] = {87, 101, 110};
constexpr int32_t kHopper = 90;  // its code is for no other

struct Virtual {
  int32_t arch;
  std::vector<int32_t> users;
};
// The newest first. 110 has as much shared memory as the GPUs of data centres, 120 as much as those of workstations.
const std::vector<Virtual>& virtual_archs() {
  static const std::vector<Virtual>& all = *new std::vector<Virtual>{{90, {110, 120}}, {80, {87}}};
  return all;
}

bool integrated(int32_t arch) {
  return std::find(std::begin(kIntegrated), std::end(kIntegrated), arch) != std::end(kIntegrated);
}

}  // namespace

std::string target_name(const Target& target) {
  if (target.ptx) return "compute_" + std::to_string(target.arch);
  return "sm_" + std::to_string(target.arch) + (target.arch == kHopper ? "a" : "");
}

std::vector<Target> prebuilt_targets() {
  std::vector<Target> targets(std::begin(kArchs), std::end(kArchs));
  for (const Virtual& of : virtual_archs()) targets.emplace_back(of.arch, true);
  return targets;
}

std::vector<Target> prebuilt_targets_for(int32_t arch) {
  std::vector<Target> targets;
  for (auto own = std::rbegin(kArchs); own != std::rend(kArchs); ++own) {
    const bool family = *own / 10 == arch / 10 && *own < arch && *own != kHopper && !integrated(arch);
    if (*own == arch || family) targets.emplace_back(*own);
  }
  const auto ptx = std::find_if(virtual_archs().begin(), virtual_archs().end(),
                                [arch](const Virtual& of) { return of.arch <= arch; });
  if (ptx != virtual_archs().end()) targets.emplace_back(ptx->arch, true);
  return targets;
}

std::vector<int32_t> ptx_users(int32_t virtual_arch) {
  for (const Virtual& of : virtual_archs()) {
    if (of.arch == virtual_arch) return of.users;
  }
  return {};
}

}  // namespace tessera::cuda
