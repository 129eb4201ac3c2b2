// Messages by NCCL, which is opened when it is first needed: the types and functions that are used here, so that
// building needs no header of NCCL's. https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html
#include <dlfcn.h>

#include <cstdint>
#include <mutex>
#include <string>

#include "core/status.hpp"
#include "cuda/cuda.hpp"
#include "cuda/ranks.hpp"
#include "cuda/runtime/driver.hpp"
#include "cuda/runtime/environment.hpp"

namespace tessera::cuda {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";
constexpr int kOldest = 2700;  // 2.7.0, the first version with messages between two ranks
constexpr const char* kHowToGet = "pip install nvidia-nccl-cu13, or apt install libnccl2";

using ncclResult = int;
constexpr ncclResult kSuccess = 0;
enum ncclDataType : int { kInt8 = 0, kUint64 = 5 };

struct Nccl {
  ncclResult (*ncclGetVersion)(int* version);
  const char* (*ncclGetErrorString)(ncclResult result);
  ncclResult (*ncclCommCount)(const ncclComm* comm, int* count);
  ncclResult (*ncclCommUserRank)(const ncclComm* comm, int* rank);
  ncclResult (*ncclCommCuDevice)(const ncclComm* comm, int* device);
  ncclResult (*ncclGroupStart)();
  ncclResult (*ncclGroupEnd)();
  ncclResult (*ncclSend)(const void* data, size_t count, ncclDataType type, int peer, ncclComm* comm, CUstream stream);
  ncclResult (*ncclRecv)(void* data, size_t count, ncclDataType type, int peer, ncclComm* comm, CUstream stream);
  ncclResult (*ncclAllGather)(const void* from, void* to, size_t count, ncclDataType type, ncclComm* comm,
                              CUstream stream);
};

// "2.21.5"
std::string version_name(int version) {
  const int major = version < 10000 ? version / 1000 : version / 10000;
  const int minor = version < 10000 ? version / 100 % 10 : version / 100 % 100;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(version % 100);
}

tessera_status load(void* library, const std::string& name, Nccl& nccl) {
  const char* missing = nullptr;
  const auto symbol = [&](const char* function, auto& pointer) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(dlsym(library, function));
    if (!pointer && !missing) missing = function;
  };
  symbol("ncclGetVersion", nccl.ncclGetVersion);
  int version = 0;
  if (missing || nccl.ncclGetVersion(&version) != kSuccess) {
    return unsupported("NCCL: %s does not answer which version it is", name.c_str());
  }
  if (version < kOldest) {  // checked first, because an old library lacks functions
    return unsupported("NCCL: %s is version %s, accepted 2.7 and newer (%s)", name.c_str(),
                       version_name(version).c_str(), kHowToGet);
  }
  symbol("ncclGetErrorString", nccl.ncclGetErrorString);
  symbol("ncclCommCount", nccl.ncclCommCount);
  symbol("ncclCommUserRank", nccl.ncclCommUserRank);
  symbol("ncclCommCuDevice", nccl.ncclCommCuDevice);
  symbol("ncclGroupStart", nccl.ncclGroupStart);
  symbol("ncclGroupEnd", nccl.ncclGroupEnd);
  symbol("ncclSend", nccl.ncclSend);
  symbol("ncclRecv", nccl.ncclRecv);
  symbol("ncclAllGather", nccl.ncclAllGather);
  return missing ? unsupported("NCCL: %s has no %s", name.c_str(), missing) : ok();
}

// The library that made a communicator must be the one that uses it: the process's own functions come first, also where
// NCCL is linked statically.
tessera_status open_library(Nccl& nccl) {
  if (const std::string given = environment_variable(kGivenNccl); !given.empty()) {
    if (!given.starts_with('/')) {
      return invalid("%s: %s, a relative path, accepted an absolute one", kGivenNccl, given.c_str());
    }
    void* const library = dlopen(given.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) return unsupported("%s: %s, accepted libnccl.so.2 of NCCL 2.7 or newer", kGivenNccl, dlerror());
    return load(library, given, nccl);
  }
  if (dlsym(RTLD_DEFAULT, "ncclSend")) return load(RTLD_DEFAULT, "the process", nccl);
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (!library) library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!library) return unsupported("NCCL: %s (%s; or set %s to its file)", dlerror(), kHowToGet, kGivenNccl);
  return load(library, kLibrary, nccl);
}

// A library once opened stays open. After a failure the next call tries again, since it may be installed meanwhile.
tessera_status open_nccl(const Nccl*& nccl) {
  static std::mutex& mutex = *new std::mutex;
  static Nccl& opened = *new Nccl{};
  static bool is_open = false;
  const std::lock_guard lock(mutex);
  if (!is_open) TESSERA_RETURN_IF_ERROR(open_library(opened));
  is_open = true;
  nccl = &opened;
  return ok();
}

class NcclTransport final : public core::Transport {
 public:
  NcclTransport(const Nccl& nccl, ncclComm* comm) : nccl_(nccl), comm_(comm) {}
  NcclTransport(const NcclTransport&) = delete;
  NcclTransport& operator=(const NcclTransport&) = delete;
  ~NcclTransport() override {
    ContextScope context;
    if (ordinal_ < 0 || context.enter(ordinal_, nullptr).code != TESSERA_OK) return;
    const Driver& cu = context.driver();
    if (hashes_ != 0) cu.cuMemFree(hashes_);
    if (ready_) cu.cuEventDestroy(ready_);
    if (done_) cu.cuEventDestroy(done_);
    if (messages_) cu.cuStreamDestroy(messages_);
  }

  tessera_status make() {
    TESSERA_RETURN_IF_ERROR(called(nccl_.ncclCommCount(comm_, &ranks_), "ncclCommCount"));
    TESSERA_RETURN_IF_ERROR(called(nccl_.ncclCommUserRank(comm_, &rank_), "ncclCommUserRank"));
    TESSERA_RETURN_IF_ERROR(called(nccl_.ncclCommCuDevice(comm_, &ordinal_), "ncclCommCuDevice"));
    ContextScope context;
    TESSERA_RETURN_IF_ERROR(context.enter(ordinal_, nullptr));
    const Driver& cu = context.driver();
    TESSERA_RETURN_IF_ERROR(check(cu, cu.cuStreamCreate(&messages_, kStreamNonBlocking), "cuStreamCreate"));
    TESSERA_RETURN_IF_ERROR(check(cu, cu.cuEventCreate(&ready_, kEventDisableTiming), "cuEventCreate"));
    TESSERA_RETURN_IF_ERROR(check(cu, cu.cuEventCreate(&done_, kEventDisableTiming), "cuEventCreate"));
    const size_t bytes = static_cast<size_t>(ranks_ + 1) * sizeof(uint64_t);
    return check(cu, cu.cuMemAlloc(&hashes_, bytes), "cuMemAlloc");
  }

  int32_t ordinal() const { return ordinal_; }
  int32_t rank() const override { return rank_; }
  int32_t ranks() const override { return ranks_; }
  tessera_status check(const tessera_device& device) const override {
    if (device.backend == TESSERA_BACKEND_CUDA && device.ordinal == ordinal_) return ok();
    return invalid("communicator: of GPU %d, accepted for calls on it; the attention's device is %s", ordinal_,
                   device.backend == TESSERA_BACKEND_CUDA ? "another GPU" : "the CPU");
  }

  tessera_status begin(uint64_t, void* stream) override {
    ContextScope context;
    TESSERA_RETURN_IF_ERROR(context.enter(ordinal_, stream));
    const Driver& cu = context.driver();
    TESSERA_RETURN_IF_ERROR(check(cu, cu.cuEventRecord(ready_, static_cast<CUstream>(stream)), "cuEventRecord"));
    TESSERA_RETURN_IF_ERROR(check(cu, cu.cuStreamWaitEvent(messages_, ready_, 0), "cuStreamWaitEvent"));
    return called(nccl_.ncclGroupStart(), "ncclGroupStart");
  }
  tessera_status send(const void* data, size_t bytes, int32_t peer) override {
    return in_group(nccl_.ncclSend(data, bytes, kInt8, peer, comm_, messages_), "ncclSend");
  }
  tessera_status receive(void* data, size_t bytes, int32_t peer) override {
    return in_group(nccl_.ncclRecv(data, bytes, kInt8, peer, comm_, messages_), "ncclRecv");
  }
  tessera_status start() override {
    TESSERA_RETURN_IF_ERROR(called(nccl_.ncclGroupEnd(), "ncclGroupEnd"));
    ContextScope context;
    TESSERA_RETURN_IF_ERROR(context.enter(ordinal_, messages_));
    return check(context.driver(), context.driver().cuEventRecord(done_, messages_), "cuEventRecord");
  }
  tessera_status wait(void* stream, core::Cancel&) override {
    ContextScope context;
    TESSERA_RETURN_IF_ERROR(context.enter(ordinal_, stream));
    const CUresult result = context.driver().cuStreamWaitEvent(static_cast<CUstream>(stream), done_, 0);
    return check(context.driver(), result, "cuStreamWaitEvent");
  }

  tessera_status all_gather(uint64_t mine, uint64_t* all, void*, core::Cancel&) override {
    ContextScope context;
    TESSERA_RETURN_IF_ERROR(context.enter(ordinal_, messages_));
    const Driver& cu = context.driver();
    const size_t bytes = static_cast<size_t>(ranks_) * sizeof mine;
    const CUdeviceptr of_this = hashes_ + bytes;
    TESSERA_RETURN_IF_ERROR(
        check(cu, cu.cuMemcpyHtoDAsync(of_this, &mine, sizeof mine, messages_), "cuMemcpyHtoDAsync"));
    TESSERA_RETURN_IF_ERROR(called(nccl_.ncclAllGather(reinterpret_cast<const void*>(of_this),
                                                       reinterpret_cast<void*>(hashes_), 1, kUint64, comm_, messages_),
                                   "ncclAllGather"));
    TESSERA_RETURN_IF_ERROR(check(cu, cu.cuMemcpyDtoHAsync(all, hashes_, bytes, messages_), "cuMemcpyDtoHAsync"));
    return check(cu, cu.cuStreamSynchronize(messages_), "cuStreamSynchronize");
  }
  bool capturing(void* stream) const override {
    ContextScope context;
    CUcaptureStatus status = kCaptureNone;
    if (context.enter(ordinal_, stream).code != TESSERA_OK) return false;
    context.driver().cuStreamIsCapturing(static_cast<CUstream>(stream), &status);
    return status != kCaptureNone;
  }
  // The other ranks wait: their callers abort their communicators.
  void abandon(const char*) noexcept override {}

 private:
  static tessera_status check(const Driver& cu, CUresult result, const char* what) {
    return cuda::check(cu, result, what);
  }
  tessera_status called(ncclResult result, const char* function) const {
    if (result == kSuccess) return ok();
    const char* const text = nccl_.ncclGetErrorString(result);
    return internal("NCCL: %s: %s (%d)", function, text ? text : "no description", result);
  }

  // A message that fails ends the group, which this thread's later calls of NCCL would otherwise join.
  tessera_status in_group(ncclResult result, const char* function) const {
    const tessera_status status = called(result, function);
    if (status.code != TESSERA_OK) nccl_.ncclGroupEnd();
    return status;
  }

  const Nccl& nccl_;
  ncclComm* const comm_;
  int rank_ = 0, ranks_ = 0, ordinal_ = -1;
  CUstream messages_ = nullptr;
  CUevent ready_ = nullptr, done_ = nullptr;
  CUdeviceptr hashes_ = 0;  // of all ranks, and this rank's own
};

}  // namespace

tessera_status make_nccl_transport(ncclComm* comm, std::unique_ptr<core::Transport>& transport,
                                   tessera_device& device) {
  const Nccl* nccl = nullptr;
  TESSERA_RETURN_IF_ERROR(open_nccl(nccl));
  auto made = std::make_unique<NcclTransport>(*nccl, comm);
  TESSERA_RETURN_IF_ERROR(made->make());
  TESSERA_RETURN_IF_ERROR(detect(made->ordinal(), device));
  transport = std::move(made);
  return ok();
}

}  // namespace tessera::cuda
