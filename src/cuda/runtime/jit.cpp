#include "cuda/runtime/jit.hpp"

#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "core/status.hpp"
#include "cuda/runtime/nvrtc.hpp"
#include "cuda/runtime/sources.hpp"

namespace tessera::cuda {
namespace {

// Incremented when a kernel's launch changes in a way that its source does not show.
constexpr int64_t kKeyVersion = 1;

Digest content_of(const KernelSpec& spec, const Target& target) {
  const std::string source = source_of(spec);
  Hasher hasher;
  hasher.number(kKeyVersion);
  hasher.text(headers_digest(source).hex());
  hasher.text(source);
  hasher.text(target_name(target));
  for (const std::string& option : compile_options()) hasher.text(option);
  return hasher.digest();
}

// Trusted as much as the library that it is installed with.
Cache& prebuilt_cache() {
  static Cache& cache = *[] {
    Writers writers;
    writers.add_own_installation(library_path());
    return new Cache(prebuilt_folder(), std::move(writers));
  }();
  return cache;
}

// Calls `accept` with each prebuilt kernel that GPUs of an architecture run, the best first, until it returns true.
// Returns whether it did.
template <class Accept>
bool find_prebuilt(const KernelSpec& spec, int32_t arch, const Accept& accept) {
  if (prebuilt_cache().folder().empty()) return false;
  for (const Target& target : prebuilt_targets_for(arch)) {
    Binary binary;
    if (prebuilt_cache().load({content_of(spec, target), 0}, binary) && accept(binary)) return true;
  }
  return false;
}

void set_origin(Origin* origin, Origin value) {
  if (origin) *origin = value;
}

// ---- kernels in memory ----

struct KernelKey {
  const char* name;
  int32_t ordinal;
  ConfigValues config;

  bool operator==(const KernelKey& other) const {
    return ordinal == other.ordinal && config.count == other.config.count && config.value == other.config.value &&
           std::strcmp(name, other.name) == 0;
  }
};

struct KernelKeyHash {
  size_t operator()(const KernelKey& key) const {
    constexpr uint64_t kPrime = 0x100000001b3;  // FNV-1a, a number at a time
    uint64_t hash = 0xcbf29ce484222325;
    const auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * kPrime; };
    for (const char* c = key.name; *c; ++c) mix(static_cast<unsigned char>(*c));
    mix(static_cast<uint32_t>(key.ordinal));
    for (int32_t i = 0; i < key.config.count; ++i) mix(static_cast<uint32_t>(key.config.value[static_cast<size_t>(i)]));
    return static_cast<size_t>(hash ^ (hash >> 32));
  }
};

struct Slot {
  std::mutex loading;
  std::atomic<bool> ready{false};
  Kernel kernel;
};

struct Kernels {
  std::shared_mutex mutex;
  std::unordered_map<KernelKey, std::unique_ptr<Slot>, KernelKeyHash> slots;

  Slot& slot(const KernelKey& key) {
    {
      const std::shared_lock lock(mutex);
      if (const auto found = slots.find(key); found != slots.end()) return *found->second;
    }
    const std::lock_guard lock(mutex);
    std::unique_ptr<Slot>& slot = slots[key];
    if (!slot) slot = std::make_unique<Slot>();
    return *slot;
  }
};

// Never destroyed: the driver may be gone before it.
Kernels& kernels() {
  static Kernels& it = *new Kernels;
  return it;
}

// Loads into the current context, so that no launch has to. The module stays loaded as long as the process runs.
tessera_status load(const Driver& cu, const KernelSpec& spec, const Binary& binary, const tessera_device& device,
                    Kernel& kernel) {
  const CaptureRelaxed relaxed(cu);
  const std::string symbol = symbol_of(spec);
  const auto failed = [&](CUresult result, const char* call) {
    return check(cu, result, (symbol + ": " + call).c_str());
  };
  CUdevice gpu = 0;
  TESSERA_RETURN_IF_ERROR(failed(cu.cuDeviceGet(&gpu, device.ordinal), "cuDeviceGet"));
  CUlibrary library = nullptr;
  TESSERA_RETURN_IF_ERROR(
      failed(cu.cuLibraryLoadData(&library, binary.cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
             "cuLibraryLoadData"));
  const auto prepare = [&]() -> tessera_status {
    CUkernel handle = nullptr;
    CUfunction function = nullptr;
    TESSERA_RETURN_IF_ERROR(failed(cu.cuLibraryGetKernel(&handle, library, symbol.c_str()), "cuLibraryGetKernel"));
    TESSERA_RETURN_IF_ERROR(
        failed(cu.cuKernelSetAttribute(kFunctionMaxDynamicSmemBytes, static_cast<int>(spec.smem_bytes), handle, gpu),
               "cuKernelSetAttribute"));
    TESSERA_RETURN_IF_ERROR(failed(cu.cuKernelGetFunction(&function, handle), "cuKernelGetFunction"));
    constexpr int32_t kOldestEarlyArch = 90;
    const bool early = spec.begins_early && device.arch >= kOldestEarlyArch;
    kernel = {handle, spec.name, spec.threads, spec.smem_bytes, early};
    return ok();
  };
  const tessera_status status = prepare();
  if (status.code != TESSERA_OK) cu.cuLibraryUnload(library);
  return status;
}

tessera_status make_kernel(const KernelSpec& spec, const tessera_device& device, Kernel& kernel) {
  if (spec.smem_bytes > device.smem_bytes) {
    return unsupported("%s: needs %lld bytes of shared memory, GPU %d has %lld a block", spec.name,
                       static_cast<long long>(spec.smem_bytes), device.ordinal,
                       static_cast<long long>(device.smem_bytes));
  }
  ContextScope context;
  TESSERA_RETURN_IF_ERROR(context.enter(device.ordinal, nullptr));
  // A prebuilt kernel that this driver cannot load, because it is of a newer CUDA, is compiled here.
  const bool loaded = find_prebuilt(spec, device.arch, [&](const Binary& prebuilt) {
    return load(context.driver(), spec, prebuilt, device, kernel).code == TESSERA_OK;
  });
  if (loaded) return ok();
  Binary binary;
  TESSERA_RETURN_IF_ERROR(build_binary(spec, device.arch, default_cache(), binary));
  return load(context.driver(), spec, binary, device, kernel);
}

}  // namespace

Cache& default_cache() {
  static Cache& cache = *new Cache(Cache::default_folder());
  return cache;
}

std::string prebuilt_refusal() { return prebuilt_cache().folder().empty() ? "" : prebuilt_cache().refusal(); }

std::string prebuilt_folder() {
  struct stat info;
  const std::string library = library_folder();
  for (const char* below : {"/tessera/aot", "/aot"}) {
    const std::string folder = library + below;
    if (!library.empty() && stat(folder.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return folder;
  }
  return "";
}

tessera_status build_binary(const KernelSpec& spec, const Target& target, Cache& cache, Binary& binary, Origin* origin,
                            CacheKey* key_out) {
  set_origin(origin, Origin::kCached);
  CacheKey own;
  CacheKey& key = key_out ? *key_out : own;
  key = {content_of(spec, target), 0};
  CompilerInfo compiler;
  const tessera_status found = find_compiler(compiler);
  // Without a compiler, an entry of any compiler version is accepted.
  if (found.code == TESSERA_OK) key.compiler = compiler.version;
  if (cache.load(key, binary)) return ok();
  TESSERA_RETURN_IF_ERROR(found);
  TESSERA_RETURN_IF_ERROR(open_compiler(compiler));
  key.compiler = compiler.version;
  bool compiled = false;
  const auto compile = [&](Binary& out) {
    out.config = spec.config;
    return compile_kernel(source_of(spec), symbol_of(spec), target, out);
  };
  TESSERA_RETURN_IF_ERROR(cache.get(key, compile, binary, &compiled));
  if (compiled) set_origin(origin, Origin::kCompiled);
  return ok();
}

tessera_status find_binary(const KernelSpec& spec, int32_t arch, Cache& cache, Binary& binary, Origin* origin) {
  const auto take = [&binary](Binary& prebuilt) { return binary = std::move(prebuilt), true; };
  if (find_prebuilt(spec, arch, take)) {
    set_origin(origin, Origin::kPrebuilt);
    return ok();
  }
  return build_binary(spec, arch, cache, binary, origin);
}

bool find_kernel(const char* name, const ConfigValues& config, const tessera_device& device, Kernel& out) {
  const Slot& slot = kernels().slot({name, device.ordinal, config});
  if (!slot.ready.load(std::memory_order_acquire)) return false;
  out = slot.kernel;
  return true;
}

tessera_status load_kernel(const KernelSpec& spec, const ConfigValues& config, const tessera_device& device,
                           Kernel& out) {
  Slot& slot = kernels().slot({spec.name, device.ordinal, config});
  const std::lock_guard lock(slot.loading);
  if (!slot.ready.load(std::memory_order_relaxed)) {
    TESSERA_RETURN_IF_ERROR(make_kernel(spec, device, slot.kernel));
    slot.ready.store(true, std::memory_order_release);
  }
  out = slot.kernel;
  return ok();
}

}  // namespace tessera::cuda
