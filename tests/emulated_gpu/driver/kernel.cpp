// Libraries of kernels: shared objects, which the emulated compiler returns in place of machine code.
#include "kernel.hpp"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>

#include "device.hpp"
#include "stream.hpp"

namespace tessera::emulated {
namespace {

// Kept for the lifetime of the process: a kernel's runner keeps stacks.
struct Library {
  void* handle = nullptr;
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

// Kernels call this library to ask if memory is mapped, but the process has loaded it with local symbols.
void offer_own_symbols() {
  static const bool done = [] {
    Dl_info self;
    return dladdr(reinterpret_cast<const void*>(&offer_own_symbols), &self) != 0 &&
           dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL) != nullptr;
  }();
  if (!done) std::fprintf(stderr, "emulated GPU: its own symbols are not offered to kernels\n");
}

// The size of an ELF file whose section headers come last.
size_t elf_bytes(const void* code) {
  Elf64_Ehdr header;
  std::memcpy(&header, code, sizeof header);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return 0;
  return header.e_shoff + size_t{header.e_shnum} * header.e_shentsize;
}

// Loads it from a temporary file; EMULATED_GPU_KEEP keeps the file, for debuggers and profilers.
void* open_shared_object(const void* code, size_t bytes) {
  const char* const folder = std::getenv("TMPDIR");
  std::string path = std::string(folder && *folder ? folder : "/tmp") + "/emulated_kernel_XXXXXX";
  const int file = mkstemp(path.data());
  if (file < 0) return nullptr;
  const bool written = write(file, code, bytes) == static_cast<ssize_t>(bytes);
  close(file);
  void* const handle = written ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (!handle) std::fprintf(stderr, "emulated GPU: %s\n", written ? dlerror() : "cannot write a kernel's file");
  if (!std::getenv("EMULATED_GPU_KEEP")) unlink(path.c_str());
  return handle;
}

}  // namespace

Arguments::Arguments(std::span<const size_t> bytes, void* const* params) {
  size_t chunks = 0;
  for (const size_t size : bytes) {
    first_.push_back(chunks);
    chunks += (size + sizeof(Chunk) - 1) / sizeof(Chunk);
  }
  chunks_.resize(chunks);
  for (size_t i = 0; i < bytes.size(); ++i) std::memcpy(&chunks_[first_[i]], params[i], bytes[i]);
}

std::vector<void*> Arguments::pointers() {
  std::vector<void*> all;
  for (const size_t first : first_) all.push_back(&chunks_[first]);
  return all;
}

CUresult make_kernel_work(const void* function, const unsigned (&grid)[3], const unsigned (&block)[3],
                          unsigned smem_bytes, void* const* params, KernelWork& work) {
  constexpr unsigned kMostX = 0x7fffffff, kMostYZ = 65535;
  if (!function || !params) return kInvalidValue;
  const Kernel& kernel = *static_cast<const Kernel*>(function);
  const auto refuse = [&kernel](CUresult result, const char* why) {
    std::fprintf(stderr, "emulated GPU: %s: %s\n", kernel.name.c_str(), why);
    return result;
  };
  for (const unsigned n : {grid[0], grid[1], grid[2], block[0], block[1], block[2]}) {
    if (n == 0) return refuse(kInvalidValue, "a grid or a block of nothing");
  }
  if (grid[0] > kMostX || grid[1] > kMostYZ || grid[2] > kMostYZ) return refuse(kInvalidValue, "too large a grid");
  if (block[0] * block[1] * block[2] > kernel.bounds.threads)
    return refuse(kInvalidValue, "more threads than its launch bounds");
  if (smem_bytes > kernel.most_smem_bytes) return refuse(kInvalidValue, "more shared memory than its attribute");
  if (grid[0] % kernel.bounds.cluster != 0) return refuse(kInvalidValue, "a grid that is no multiple of its clusters");
  work.kernel = &kernel;
  std::copy(std::begin(grid), std::end(grid), work.grid);
  std::copy(std::begin(block), std::end(block), work.block);
  work.smem_bytes = smem_bytes;
  work.arguments = Arguments(kernel.param_bytes, params);
  return kSuccess;
}

}  // namespace tessera::emulated

using namespace tessera::emulated;
using tessera::cuda::CUfunction;
using tessera::cuda::CUkernel;
using tessera::cuda::CUlaunchConfig;
using tessera::cuda::CUlibrary;
using tessera::cuda::CUstream;

EMULATED_DRIVER cuLibraryLoadData(CUlibrary* library, const void* code, int*, void**, unsigned, int*, void**,
                                  unsigned) {
  if (refuses_while_captured()) return kCaptureUnsupported;
  offer_own_symbols();
  const size_t bytes = elf_bytes(code);
  void* const handle = bytes ? open_shared_object(code, bytes) : nullptr;
  if (!handle) return kInvalidImage;
  auto* const made = new Library;
  made->handle = handle;
  return *library = reinterpret_cast<CUlibrary>(made), kSuccess;
}
EMULATED_DRIVER cuLibraryUnload(CUlibrary) { return kSuccess; }
EMULATED_DRIVER cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  Library& of = *reinterpret_cast<Library*>(library);
  const std::lock_guard lock(of.mutex);
  std::unique_ptr<Kernel>& found = of.kernels[name];
  if (!found) {
    const auto symbol = [&](const char* what) { return dlsym(of.handle, (std::string(name) + what).c_str()); };
    const auto run = reinterpret_cast<EmulatedKernel>(symbol("_emulated"));
    const auto* const info = static_cast<const EmulatedKernelInfo*>(symbol("_info"));
    const auto* const bounds = static_cast<const EmulatedLaunchBounds*>(symbol("_bounds"));
    if (!run || !info || !bounds) return kNotFound;
    found = std::make_unique<Kernel>(Kernel{name, run, {info->param_bytes, info->param_count}, *bounds});
  }
  return *kernel = reinterpret_cast<CUkernel>(found.get()), kSuccess;
}
EMULATED_DRIVER cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  return *function = reinterpret_cast<CUfunction>(kernel), kSuccess;
}
EMULATED_DRIVER cuKernelSetAttribute(int attribute, int value, CUkernel kernel, int) {
  if (attribute != tessera::cuda::kFunctionMaxDynamicSmemBytes || value < 0 || value > smem_bytes_per_block())
    return kInvalidValue;
  return reinterpret_cast<Kernel*>(kernel)->most_smem_bytes = static_cast<unsigned>(value), kSuccess;
}

EMULATED_DRIVER cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned smem_bytes, CUstream stream, void** params,
                               void** extra) {
  if (extra) return kNotSupported;
  KernelWork work;
  const CUresult made =
      make_kernel_work(function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, smem_bytes, params, work);
  return made == kSuccess ? submit(stream, std::move(work)) : made;
}
// Attributes say when a kernel may start; here each kernel starts when the previous one has ended.
EMULATED_DRIVER cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
  if (extra) return kNotSupported;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const auto id = config->attributes[i].id;
    if (id != tessera::cuda::kLaunchProgrammaticSerialization && id != tessera::cuda::kLaunchPriority)
      return kNotSupported;
  }
  KernelWork work;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    work.early = work.early || config->attributes[i].id == tessera::cuda::kLaunchProgrammaticSerialization;
  }
  const CUresult made = make_kernel_work(function, config->grid, config->block, config->smem_bytes, params, work);
  return made == kSuccess ? submit(config->stream, std::move(work)) : made;
}
// The emulated GPU has no machine code.
EMULATED_DRIVER cuModuleLoadData(void**, const void*) { return kInvalidImage; }
EMULATED_DRIVER cuModuleGetFunction(void**, void*, const char*) { return kNotFound; }
