#include "call.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "error.hpp"
#include "interrupt.hpp"
#include "openmp.hpp"
#include "released_gil.hpp"

namespace nb = nanobind;

namespace tessera::python {
namespace {

// A hint for a common mistake: SDPA's [B, H, S, D] read as [B, S, H, D].
std::string hint(const Call& call, std::string_view message) {
  const bool heads_do_not_divide = message.find("the number of query heads must be a multiple") != message.npos;
  return heads_do_not_divide && !call.heads_first ? "; of [B, H, S, D] arrays, layout=\"bhsd\" says so" : "";
}

class PlanCache {
 public:
  const tessera_plan& find_or_make(const Call& call) {
    // Most recent first. Problems usually differ within the first hundred bytes, so this is fast.
    const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const auto& entry) {
      return entry->kernel == call.kernel && entry->threads == call.threads && entry->cores == call.cores &&
             entry->place.device_type == call.place.place().device_type &&
             entry->place.device_id == call.place.place().device_id &&
             std::memcmp(&entry->problem, &call.problem, sizeof call.problem) == 0;
    });
    if (found != entries_.end()) {
      std::rotate(entries_.begin(), found, found + 1);
      return entries_.front()->plan;
    }
    auto entry = std::make_unique<Entry>();
    std::memcpy(&entry->problem, &call.problem, sizeof call.problem);
    entry->program = call.program;  // kept, so that no other program can get its address
    entry->kernel = call.kernel;
    entry->threads = call.threads;
    entry->cores = call.cores;
    entry->place = call.place.place();
    tessera_device where = device_at(entry->place, call.place.first() ? call.place.first() : "q");
    set_family(where, call.kernel);
    if (call.threads > 0) where.threads = call.threads;
    if (call.cores > 0) where.cores = call.cores;
    const tessera_status status = tessera_make_plan(&call.problem, &where, &entry->plan);
    if (status.code != TESSERA_OK) throw Error(status.message + hint(call, status.message));
    if (entries_.size() == kMostEntries) entries_.pop_back();
    entries_.insert(entries_.begin(), std::move(entry));
    return entries_.front()->plan;
  }

 private:
  static constexpr size_t kMostEntries = 32;
  struct Entry {
    tessera_problem problem;
    ProgramHandle program;
    int32_t kernel, threads, cores;
    Place place;
    tessera_plan plan;
  };
  std::vector<std::unique_ptr<Entry>> entries_;
};

// Grows as needed; large memory is returned at once.
class Workspace {
 public:
  void* at_least(size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      bytes_ = 0;  // in case there is no memory for more
      memory_.reset(new std::byte[bytes]);
      bytes_ = bytes;
    }
    return memory_.get();
  }
  size_t bytes() const { return bytes_; }
  void give_back_if_large() {
    constexpr size_t kMostKept = size_t{64} << 20;
    if (bytes_ <= kMostKept) return;
    memory_.reset();
    bytes_ = 0;
  }

 private:
  std::unique_ptr<std::byte[]> memory_;
  size_t bytes_ = 0;
};

thread_local PlanCache plans;
thread_local Workspace workspace;

}  // namespace

const tessera_device& cpu() {
  static std::mutex mutex;
  static bool known = false;
  static tessera_device found;
  const std::lock_guard lock(mutex);
  if (!known) {
    check(tessera_device_cpu(&found));
    known = true;
  }
  return found;
}

tessera_device device_at(const Place& place, const std::string& what) {
  const std::string refusal = what + ": on device " + name_of(place) + ", accepted the CPU: ";
  if (place.device_type == kCpu || place.device_type == kMeta) return cpu();
  if (place.device_type != kCuda) throw Error(refusal + "Tessera has no backend for this device");
  tessera_device found;
  constexpr int32_t kArchOfNoGpu = 90;
  const tessera_status status = place.device_id == kNoGpu ? tessera_device_cuda_arch(kArchOfNoGpu, &found)
                                                          : tessera_device_cuda(place.device_id, &found);
  if (status.code != TESSERA_OK) throw Error(refusal + status.message);
  return found;
}

const tessera_plan& plan_of(const Call& call) { return plans.find_or_make(call); }

tessera_status run_plan(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace, size_t bytes,
                        const tessera_executor& executor) {
  const auto run = plan.problem.direction == TESSERA_BACKWARD ? tessera_backward : tessera_forward;
  return run(&plan, &buffers, workspace, bytes, &executor);
}

tessera_status run_on_cpu(const Call& call, const tessera_plan& plan, const tessera_executor& executor) {
  void* memory = workspace.at_least(static_cast<size_t>(plan.workspace_bytes));
  const tessera_status status = run_plan(plan, call.buffers, memory, workspace.bytes(), executor);
  workspace.give_back_if_large();
  return status;
}

namespace {

void execute_cuda(const Call& call, const tessera_plan& plan) {
  const size_t bytes = static_cast<size_t>(plan.workspace_bytes);
  Array memory;  // released once the kernels are in the stream, because later users come later in it
  nb::object owner;
  if (bytes > 0) {
    if (!call.allocate.is_valid()) throw Error("workspace: absent, accepted a function that allocates it on the GPU");
    owner = call.allocate((bytes + sizeof(float) - 1) / sizeof(float));
    memory = import_array("workspace", owner, Access::kWrite, "float32");
  }
  tessera_executor executor{};
  executor.stream = call.place.place().stream;
  tessera_status status;
  {
    const ReleasedGil released;
    status = run_plan(plan, call.buffers, memory.data, bytes, executor);
  }
  check(status);
}

}  // namespace

void execute(const Call& call) {
  if (call.without_data)
    throw Error(std::string(call.without_data) + ": without data, accepted an array that has some");
  const tessera_plan& plan = plan_of(call);
  if (plan.device.backend == TESSERA_BACKEND_CUDA) return execute_cuda(call, plan);
  tessera_executor executor = call.openmp ? openmp_executor() : tessera_executor{};
  Interrupt interrupt;
  interrupt.add_to(executor);
  tessera_status status;
  {
    const ReleasedGil released;
    status = run_on_cpu(call, plan, executor);
  }
  Interrupt::check(status);
}

}  // namespace tessera::python
