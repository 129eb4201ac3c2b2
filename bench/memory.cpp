#include "memory.hpp"

#include <malloc.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "standard.hpp"

namespace bench {
namespace {

// A line such as "VmHWM:   1234 kB" of this process's status.
double status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    double kibibytes = 0;
    if (word == key + ":" && status >> kibibytes) return 1024 * kibibytes;
  }
  throw std::runtime_error("/proc/self/status has no " + key);
}

// By how much resident memory grows while `call` runs.
double peak_rise_bytes(const std::function<void()>& call) {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5";  // resets the high-water mark
  const double before = status_bytes("VmRSS");
  call();
  return status_bytes("VmHWM") - before;
}

// A run's memory does not vary: one run is enough.
Sampler once(Sampler sampler) {
  return [sampler = std::move(sampler), answer = 0.0]() mutable { return answer > 0 ? answer : answer = sampler(); };
}

}  // namespace

Contest memory_contest(const Settings& settings, const Shape& shape) {
  auto attention = std::make_shared<Attention>(shape, settings.device, settings.seed);
  const int threads = settings.device.threads;
  attention->run();  // touches the outputs and starts the threads
  const Sampler tessera_memory = [attention] {
    const size_t workspace_bytes = tessera::workspace_bytes(attention->plan());
    const double rise = peak_rise_bytes([&] { attention->run(Buffer(workspace_bytes)); });
    return 1 / std::max(rise, static_cast<double>(workspace_bytes));
  };
  const Sampler standard_memory = [attention, shape, threads] {
    return 1 / peak_rise_bytes([&] { StandardPeer(shape, *attention, threads).run(); });
  };
  return {.subject = once(tessera_memory), .reference = once(standard_memory)};
}

}  // namespace bench
