#include "stream.hpp"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "device.hpp"
#include "memory.hpp"

namespace tessera::emulated {
namespace {

using cuda::CUstream;

enum CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

thread_local int capture_mode = kGlobal;
std::atomic<int> global_captures{0};

struct Streams {
  std::mutex mutex;
  std::set<Stream*> alive;
  Stream defaults[kMostDevices];
};
Streams& streams() {
  static Streams& it = *new Streams;
  return it;
}
uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

Stream* default_stream_of(Context* context) {
  Stream& stream = streams().defaults[context->device];
  const std::lock_guard lock(streams().mutex);
  if (!stream.context) stream.context = context, stream.id = next_id();
  return &stream;
}

enum class Order { kAtOnce, kLate, kEarly };
Order order() {
  static const Order it = [] {
    const char* const name = std::getenv("EMULATED_GPU_STREAMS");
    return !name ? Order::kAtOnce : std::strcmp(name, "late") == 0 ? Order::kLate : Order::kEarly;
  }();
  return it;
}

// Executes the stream's tasks, or those up to an event's record number `times`; and of other streams those that they
// wait for.
CUresult run_tasks(Stream& stream, const Event* until, uint64_t times) {
  while (!stream.tasks.empty() && !(until && until->done >= times)) {
    const Task task = std::move(stream.tasks.front());
    stream.tasks.pop_front();
    const Event* const event = task.awaited;
    const CUresult result = event ? run_tasks(*event->stream, event, task.times) : task.run();
    if (result != kSuccess) return result;
  }
  return kSuccess;
}
CUresult finish(Stream& stream) { return run_tasks(stream, nullptr, 0); }

CUresult perform(Stream& stream, std::function<CUresult()> run) {
  if (order() == Order::kAtOnce) return run();
  stream.tasks.push_back({std::move(run)});
  return kSuccess;
}

}  // namespace

CUresult finish_context() {
  if (order() == Order::kAtOnce) return kSuccess;
  std::vector<Stream*> of_context{default_stream_of(current_context())};
  {
    const std::lock_guard lock(streams().mutex);
    for (Stream* const stream : streams().alive) {
      if (stream->context == current_context()) of_context.push_back(stream);
    }
  }
  for (Stream* const stream : of_context) {
    if (const CUresult result = finish(*stream); result != kSuccess) return result;
  }
  return kSuccess;
}

bool refuses_while_captured() { return capture_mode != kRelaxed && global_captures.load() > 0; }

CUresult find_stream(CUstream handle, Stream*& stream) {
  constexpr uintptr_t kPerThreadDefault = 2;
  if (reinterpret_cast<uintptr_t>(handle) <= kPerThreadDefault) {
    if (!current_context()) return kInvalidContext;
    return stream = default_stream_of(current_context()), kSuccess;
  }
  stream = reinterpret_cast<Stream*>(handle);
  const std::lock_guard lock(streams().mutex);
  return streams().alive.contains(stream) ? kSuccess : kInvalidHandle;
}

CUresult submit(CUstream handle, Work work) {
  if (const CUresult result = check_context(); result != kSuccess) return result;
  return with_stream(handle, [&work](Stream& stream) -> CUresult {
    if (stream.context != current_context()) return kInvalidHandle;
    if (!stream.captured) {
      return perform(stream, [work = std::move(work), &stream]() mutable { return execute(work, *stream.context); });
    }
    if (stream.invalidated) return kCaptureInvalidated;
    stream.captured->nodes.push_back(std::make_unique<Node>(Node{std::move(work)}));
    return kSuccess;
  });
}

namespace {

// For a call that waits. While the stream is captured, it is refused and invalidates the capture.
CUresult wait_for(CUstream handle) {
  if (const CUresult result = check_context(); result != kSuccess) return result;
  return with_stream(handle, [](Stream& stream) -> CUresult {
    if (!stream.captured) return finish(stream);
    stream.invalidated = true;
    return kCaptureUnsupported;
  });
}

using CUevent = struct CUevent_st*;
Event* own(CUevent event) { return reinterpret_cast<Event*>(event); }

}  // namespace
}  // namespace tessera::emulated

using namespace tessera::emulated;
using tessera::cuda::CUcontext;
using tessera::cuda::CUdeviceptr;
using tessera::cuda::CUgraph;
using tessera::cuda::CUstream;

EMULATED_DRIVER cuStreamCreate(CUstream* handle, unsigned) {
  if (const CUresult result = check_context(); result != kSuccess) return result;
  auto* const stream = new Stream{.context = current_context(), .id = next_id(), .priority = 0, .captured = nullptr};
  const std::lock_guard lock(streams().mutex);
  streams().alive.insert(stream);
  return *handle = reinterpret_cast<CUstream>(stream), kSuccess;
}
EMULATED_DRIVER cuStreamDestroy_v2(CUstream handle) {
  auto* const stream = reinterpret_cast<Stream*>(handle);
  if (const CUresult result = with_stream(handle, [](Stream& of) { return finish(of); }); result != kSuccess) {
    return result;
  }
  const std::lock_guard lock(streams().mutex);
  if (streams().alive.erase(stream) == 0) return kInvalidHandle;
  return delete stream, kSuccess;
}
EMULATED_DRIVER cuStreamGetCtx(CUstream handle, CUcontext* context) {
  return with_stream(
      handle, [&](const Stream& stream) { return *context = reinterpret_cast<CUcontext>(stream.context), kSuccess; });
}
EMULATED_DRIVER cuStreamGetId(CUstream handle, uint64_t* id) {
  return with_stream(handle, [&](const Stream& stream) { return *id = stream.id, kSuccess; });
}
EMULATED_DRIVER cuStreamGetPriority(CUstream handle, int* priority) {
  return with_stream(handle, [&](const Stream& stream) { return *priority = stream.priority, kSuccess; });
}
EMULATED_DRIVER cuStreamSynchronize(CUstream handle) { return wait_for(handle); }

// ---- capture ----

EMULATED_DRIVER cuStreamIsCapturing(CUstream handle, int* status) {
  enum { kNone = 0, kActive = 1, kInvalidated = 2 };
  return with_stream(handle, [&](const Stream& stream) {
    return *status = !stream.captured ? kNone : stream.invalidated ? kInvalidated : kActive, kSuccess;
  });
}
EMULATED_DRIVER cuThreadExchangeStreamCaptureMode(int* mode) { return std::swap(*mode, capture_mode), kSuccess; }
EMULATED_DRIVER cuStreamBeginCapture_v2(CUstream handle, int mode) {
  return with_stream(handle, [&](Stream& stream) -> CUresult {
    if (stream.captured || !handle) return kCaptureUnsupported;
    stream.captured = std::make_unique<Graph>();
    stream.captured->context = stream.context;
    stream.invalidated = false, stream.capture_mode = mode;
    if (mode != kRelaxed) ++global_captures;
    return kSuccess;
  });
}
EMULATED_DRIVER cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  return with_stream(handle, [&](Stream& stream) -> CUresult {
    if (!stream.captured) return kInvalidValue;
    if (stream.capture_mode != kRelaxed) --global_captures;
    const std::unique_ptr<Graph> captured = std::move(stream.captured);
    *graph = nullptr;
    if (stream.invalidated) return kCaptureInvalidated;
    *graph = reinterpret_cast<CUgraph>(new Graph(std::move(*captured)));
    return kSuccess;
  });
}

// ---- copies and fills ----

namespace {

bool on_device(CUdeviceptr address, size_t bytes) { return bytes == 0 || is_mapped(address, bytes); }

CUresult fill(CUdeviceptr address, unsigned value, unsigned element_bytes, size_t count, CUstream stream) {
  if (!on_device(address, element_bytes * count) || address % element_bytes != 0) return kInvalidValue;
  return submit(stream, MemsetWork{address, value, element_bytes, count});
}

CUresult copy(void* to, const void* from, size_t bytes, CUstream stream) {
  return submit(stream, CopyWork{to, from, bytes});
}
void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

EMULATED_DRIVER cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return on_device(to, bytes) ? copy(pointer(to), from, bytes, stream) : kInvalidValue;
}
EMULATED_DRIVER cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return on_device(from, bytes) ? copy(to, pointer(from), bytes, stream) : kInvalidValue;
}
EMULATED_DRIVER cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  const bool fine = on_device(to, bytes) && on_device(from, bytes);
  return fine ? copy(pointer(to), pointer(from), bytes, stream) : kInvalidValue;
}
EMULATED_DRIVER cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  if (refuses_while_captured()) return kCaptureUnsupported;
  const CUresult result = cuMemcpyHtoDAsync_v2(to, from, bytes, nullptr);
  return result == kSuccess ? finish_context() : result;
}
EMULATED_DRIVER cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  if (refuses_while_captured()) return kCaptureUnsupported;
  const CUresult result = cuMemcpyDtoHAsync_v2(to, from, bytes, nullptr);
  return result == kSuccess ? finish_context() : result;
}
EMULATED_DRIVER cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream stream) {
  return fill(address, value, 1, count, stream);
}
EMULATED_DRIVER cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t count) {
  return refuses_while_captured() ? kCaptureUnsupported : fill(address, value, 1, count, nullptr);
}
EMULATED_DRIVER cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
  return fill(address, value, sizeof value, count, stream);
}

EMULATED_DRIVER cuLaunchHostFunc(CUstream handle, void (*function)(void*), void* argument) {
  return with_stream(handle, [&](Stream& stream) -> CUresult {
    if (stream.captured) return kNotSupported;
    const CUresult result = perform(stream, [function, argument] { return function(argument), kSuccess; });
    return result == kSuccess && order() == Order::kEarly ? finish(stream) : result;
  });
}

// ---- events ----

EMULATED_DRIVER cuEventCreate(CUevent* event, unsigned) {
  return *event = reinterpret_cast<CUevent>(new Event{}), kSuccess;
}
EMULATED_DRIVER cuEventDestroy_v2(CUevent event) { return delete own(event), kSuccess; }
EMULATED_DRIVER cuEventRecord(CUevent handle, CUstream stream_handle) {
  if (const CUresult result = check_context(); result != kSuccess) return result;
  return with_stream(stream_handle, [handle](Stream& stream) -> CUresult {
    Event* const event = own(handle);
    event->stream = &stream;
    return perform(stream, [event, times = ++event->recorded] {
      event->time = std::chrono::steady_clock::now();
      return event->done = times, kSuccess;
    });
  });
}
EMULATED_DRIVER cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned) {
  if (const CUresult result = check_context(); result != kSuccess) return result;
  return with_stream(stream_handle, [handle](Stream& stream) -> CUresult {
    Event* const event = own(handle);
    if (event->done < event->recorded) stream.tasks.push_back({{}, event, event->recorded});
    return kSuccess;
  });
}
EMULATED_DRIVER cuEventSynchronize(CUevent handle) {
  if (const CUresult result = check_context(); result != kSuccess) return result;
  Event* const event = own(handle);
  if (event->done == event->recorded) return kSuccess;
  return run_tasks(*event->stream, event, event->recorded);
}
EMULATED_DRIVER cuEventElapsedTime(float* milliseconds, CUevent begin, CUevent end) {
  const auto time = own(end)->time - own(begin)->time;
  return *milliseconds = std::chrono::duration<float, std::milli>(time).count(), kSuccess;
}
