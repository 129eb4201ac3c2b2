#include "machine.hpp"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

namespace tessera::cli {
namespace {

// The value of "key:   123 kB" in a file of /proc, in bytes, 0 if there is none.
std::int64_t kibibytes_field(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key + ":")) continue;
    std::istringstream value(line.substr(key.size() + 1));
    std::int64_t kibibytes = 0;
    value >> kibibytes;
    return kibibytes * 1024;
  }
  return 0;
}

std::string first_word(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

// Of all processors together, since the system was started. The unit does not matter.
struct Ticks {
  double idle = 0, all = 0;
};
Ticks ticks() {
  std::ifstream file("/proc/stat");
  std::string name;
  file >> name;
  constexpr int kIdle = 3, kFields = 8;  // user nice system idle iowait irq softirq steal
  Ticks result;
  double value = 0;
  for (int field = 0; field < kFields && file >> value; ++field) {
    result.all += value;
    if (field == kIdle) result.idle = value;
  }
  return result;
}

// Cores in a list such as "0-3,8".
int count_of(const std::string& list) {
  int count = 0;
  std::istringstream ranges(list);
  for (std::string range; std::getline(ranges, range, ',');) {
    int from = 0, to = 0;
    char dash = 0;
    std::istringstream numbers(range);
    numbers >> from;
    count += numbers >> dash >> to ? to - from + 1 : 1;
  }
  return count;
}

}  // namespace

std::vector<Cache> caches() {
  std::vector<Cache> found;
  for (int index = 0;; ++index) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    const std::string level = first_word(folder + "level"), type = first_word(folder + "type");
    if (level.empty()) return found;
    if (type == "Instruction") continue;
    std::istringstream size(first_word(folder + "size"));
    std::int64_t amount = 0;
    char unit = ' ';
    size >> amount >> unit;
    found.push_back({.name = "L" + level + (level == "1" ? "d" : ""),
                     .size_bytes = amount * (unit == 'M'   ? 1 << 20
                                             : unit == 'K' ? 1 << 10
                                                           : 1),
                     .shared_by = count_of(first_word(folder + "shared_cpu_list"))});
  }
}

std::vector<std::string> cpu_features() {
  static const std::set<std::string> kUsable = {"sse4_2",      "avx",      "avx2",     "fma",      "f16c",
                                                "avx512f",     "avx512bw", "avx512dq", "avx512vl", "avx512_bf16",
                                                "avx512_fp16", "amx_bf16", "asimd",    "bf16",     "sve"};
  std::vector<std::string> found;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("flags") && !line.starts_with("Features")) continue;
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      if (kUsable.contains(word)) found.push_back(word);
    }
    break;
  }
  return found;
}

std::int64_t memory_bytes() { return kibibytes_field("/proc/meminfo", "MemTotal"); }

std::string busy_text(int threads) {
  const Ticks before = ticks();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const Ticks after = ticks();
  if (after.all <= before.all) return "";
  const auto processors = static_cast<double>(sysconf(_SC_NPROCESSORS_ONLN));
  const double idle = (after.idle - before.idle) / (after.all - before.all) * processors;
  constexpr double kNothing = 0.5;  // half of a processor, which a desktop uses when idle
  if (idle + kNothing >= threads) return "";
  char text[160];
  std::snprintf(
      text, sizeof text,
      "The machine was busy: other work left %.1f of %.0f processors idle at the start, for %d thread%s. Times "
      "are longer than on an idle one.",
      idle, processors, threads, threads == 1 ? "" : "s");
  return text;
}

void reset_peak_resident() { std::ofstream("/proc/self/clear_refs") << "5"; }

std::int64_t peak_resident_bytes() { return kibibytes_field("/proc/self/status", "VmHWM"); }

std::int64_t resident_bytes() { return kibibytes_field("/proc/self/status", "VmRSS"); }

}  // namespace tessera::cli
