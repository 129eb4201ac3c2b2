// How much memory is left: the machine's, and that of this process's control groups.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>

#include "peers/standard_attention.hpp"

namespace tessera::peers {
namespace {

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

// The number in a one-line file, `otherwise` if there is no such file or number ("max").
std::int64_t read_number(const std::string& path, std::int64_t otherwise) {
  std::ifstream file(path);
  std::int64_t value = 0;
  return file >> value ? value : otherwise;
}

std::int64_t machine_available() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::int64_t kibibytes = 0;
  while (file >> key >> kibibytes) {
    if (key == "MemAvailable:") return kibibytes * 1024;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return kUnlimited;
}

// The difference of `limit` and `usage`, files of one control group.
std::int64_t group_available(const std::string& limit, const std::string& usage) {
  const std::int64_t bytes = read_number(limit, kUnlimited);
  if (bytes == kUnlimited) return kUnlimited;
  return std::max<std::int64_t>(0, bytes - read_number(usage, 0));
}

// Every group from this process's own up to the root may set a limit. Lines of /proc/self/cgroup: id:controllers:path.
std::int64_t groups_available() {
  std::int64_t least = kUnlimited;
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v1 = controllers.find("memory") != std::string::npos;
    if (!controllers.empty() && !v1) continue;
    const std::string root = v1 ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup";
    for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
      if (path == "/") path.clear();
      const std::string group = root + path;
      least = std::min(least, v1 ? group_available(group + "/memory.limit_in_bytes", group + "/memory.usage_in_bytes")
                                 : group_available(group + "/memory.max", group + "/memory.current"));
      if (path.rfind('/') == std::string::npos) break;
    }
  }
  return least;
}

}  // namespace

std::int64_t available_memory_bytes() { return std::min(machine_available(), groups_available()); }

bool fits(std::int64_t bytes) { return bytes <= available_memory_bytes() / 10 * 9; }

}  // namespace tessera::peers
