// The features of this machine's CPU, and the kernel table that serves it.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "core/dtypes.hpp"
#include "core/isa.hpp"
#include "core/status.hpp"
#include "cpu/cpu.hpp"
#include "cpu/tables.hpp"

namespace tessera::cpu {
namespace {

constexpr int32_t kMaxThreads = 1024;

#if defined(__x86_64__)
// The test library has tile registers in plain C++ instead of the processor's; no installed library has them.
#if defined(TESSERA_AMX_EMULATION)
constexpr bool kEmulatesAmx = true;
#else
constexpr bool kEmulatesAmx = false;
#endif

bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  return (d & kAmxBf16) != 0 && (d & kAmxTile) != 0;
}

// Whether the operating system lets this process use AMX: tile registers are 8 KiB of state for each thread, which
// Linux grants on request, once for the whole process.
bool may_use_amx() {
  if (!has_amx()) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}
#endif

int32_t look_for_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!avx2) return TESSERA_ISA_BASELINE;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx512) return TESSERA_ISA_AVX2;
  if (!__builtin_cpu_supports("avx512bf16")) return TESSERA_ISA_AVX512;
  const bool beside_tiles =
      __builtin_cpu_supports("avx512vbmi2");  // for the vectors: every processor with AMX has them
  return beside_tiles && (kEmulatesAmx || may_use_amx()) ? TESSERA_ISA_AMX_BF16 : TESSERA_ISA_AVX512_BF16;
#elif defined(__aarch64__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16
  return getauxval(AT_HWCAP2) & kBf16 ? TESSERA_ISA_NEON_BF16 : TESSERA_ISA_NEON;
#else
  return TESSERA_ISA_BASELINE;
#endif
}

#if defined(__x86_64__)
// bfloat16 with avx512 is float32 FMAs after a conversion; with avx512_bf16 it is vdpbf16ps, of which Intel's cores
// begin one in two cycles. GFLOP/s of one core, forward, D = 128, N = 2048; the backward pass has the same order: 159
// and 84, 156 and 439 (docs/lab/amx.md).
struct VectorRates {
  std::string_view vendor;  // as CPUID reports it
  double avx512, avx512_bf16;
};
constexpr VectorRates kMeasuredVectors[] = {
    {"GenuineIntel", 151, 83},   // Xeon, family 6, model 207
    {"AuthenticAMD", 156, 307},  // EPYC, family 26, model 2
};

std::string vendor() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(0, &a, &b, &c, &d)) return "";
  char text[12];
  std::memcpy(text, &b, 4), std::memcpy(text + 4, &d, 4), std::memcpy(text + 8, &c, 4);
  return {text, sizeof text};
}
#endif

// The fastest vector instruction set on this CPU, which need not be its newest.
int32_t fastest_vectors(int32_t best) {
  if (best == TESSERA_ISA_AMX_BF16) best = TESSERA_ISA_AVX512_BF16;
#if defined(__x86_64__)
  if (best == TESSERA_ISA_AVX512_BF16) {
    static const std::string mine = vendor();
    for (const VectorRates& row : kMeasuredVectors) {
      if (row.vendor == mine && row.avx512 > row.avx512_bf16) return TESSERA_ISA_AVX512;
    }
  }
#endif
  return best;
}

// Chooses AMX tiles if available (except emulated ones, which are for tests), with vectors for what these serve better.
void choose_isa(tessera_device& device) {
  device.isa = fastest_vectors(device.isa_limit);
#if defined(__x86_64__)
  if (device.isa_limit < TESSERA_ISA_AMX_BF16 || kEmulatesAmx) return;
  device.vector_isa = device.isa;
  device.isa = TESSERA_ISA_AMX_BF16;
#endif
}

int32_t usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

void brand_name(char (&name)[64]) {
  std::snprintf(name, sizeof name, "CPU");
#if defined(__x86_64__)
  unsigned words[12];
  for (unsigned leaf = 0; leaf < 3; ++leaf) {
    unsigned* w = words + 4 * leaf;
    if (!__get_cpuid(0x80000002 + leaf, &w[0], &w[1], &w[2], &w[3])) return;
  }
  std::string text(reinterpret_cast<const char*>(words), sizeof words);
  text = text.substr(0, text.find('\0'));
  text.erase(0, text.find_first_not_of(' '));
  text.erase(text.find_last_not_of(' ') + 1);
  if (!text.empty()) std::snprintf(name, sizeof name, "%s", text.c_str());
#endif
}

int64_t cache_bytes(int key, int64_t otherwise) {
  const long bytes = sysconf(key);
  return bytes > 0 ? bytes : otherwise;
}

tessera_status apply_isa(const char* text, tessera_device& device) {
  std::string accepted;
  for (int32_t isa = 0; isa <= device.isa_limit; ++isa) {
    if (!core::has_isa(device.isa_limit, isa)) continue;
    if (std::strcmp(text, tessera_isa_name(isa)) == 0) {
      device.isa = isa;
      device.vector_isa = 0;
      return ok();
    }
    accepted += std::string(isa ? ", " : "") + tessera_isa_name(isa);
  }
  return invalid("TESSERA_ISA: \"%.60s\", accepted on this CPU: %s", text, accepted.c_str());
}

tessera_status apply_threads(const char* text, tessera_device& device) {
  char* end = nullptr;
  errno = 0;
  const long threads = std::strtol(text, &end, 10);
  if (errno != 0 || end == text || *end != '\0' || threads < 1 || threads > kMaxThreads) {
    return invalid("TESSERA_NUM_THREADS: \"%.60s\", accepted 1 .. %d", text, kMaxThreads);
  }
  device.threads = static_cast<int32_t>(threads);
  return ok();
}

// Facts that do not change while the process lives; querying them takes 40 microseconds.
struct Hardware {
  int32_t isa = look_for_isa();
#if defined(__x86_64__)
  bool can_multiply_codes = isa >= TESSERA_ISA_AVX512_BF16 && __builtin_cpu_supports("avx512vbmi");
#endif
  int64_t l1_bytes = cache_bytes(_SC_LEVEL1_DCACHE_SIZE, 32 << 10);
  int64_t l2_bytes = cache_bytes(_SC_LEVEL2_CACHE_SIZE, 512 << 10);
  char name[64];
  Hardware() { brand_name(name); }
};

const Hardware& hardware() {
  static const Hardware the_hardware;
  return the_hardware;
}

}  // namespace

int32_t best_isa() { return hardware().isa; }

bool refused_amx() {
#if defined(__x86_64__)
  return hardware().isa >= TESSERA_ISA_AVX512_BF16 && has_amx() && !may_use_amx();
#else
  return false;
#endif
}

const KernelTable& kernel_table(int32_t isa) {
#if defined(__x86_64__)
  switch (isa) {
    case TESSERA_ISA_AVX2:
      return kernels_avx2;
    case TESSERA_ISA_AVX512:
      return kernels_avx512;
    case TESSERA_ISA_AVX512_BF16:
    case TESSERA_ISA_AMX_BF16:
      return kernels_avx512_bf16;
    default:
      return kernels_baseline;
  }
#elif defined(__aarch64__)
  switch (isa) {
    case TESSERA_ISA_NEON:
      return kernels_neon;
    case TESSERA_ISA_NEON_BF16:
      return kernels_neon_bf16;
    default:
      return kernels_baseline;
  }
#else
  (void)isa;
  return kernels_baseline;
#endif
}

const KernelTable& decode_table(const tessera_plan& plan) {
  const bool beside = plan.device.isa == TESSERA_ISA_AMX_BF16 && plan.device.vector_isa != 0;
  return kernel_table(beside ? plan.device.vector_isa : plan.device.isa);
}

bool can_multiply_codes() {
#if defined(__x86_64__)
  return hardware().can_multiply_codes;
#else
  return false;
#endif
}

bool is_bfloat16(const tessera_problem& problem) {
  return problem.q.dtype == TESSERA_BFLOAT16 && problem.k.dtype == TESSERA_BFLOAT16;
}

bool has_codes_for_bfloat16(const tessera_problem& problem) {
  return problem.q.dtype == TESSERA_BFLOAT16 && core::is_8bit(problem.k.dtype);
}

namespace {

const AmxKernelTable* amx_table() {
#if defined(TESSERA_AMX_EMULATION)
  return &kernels_amx_emulated;
#elif defined(__x86_64__)
  return &kernels_amx_bf16;
#else
  return nullptr;
#endif
}

}  // namespace

const AmxKernelTable* amx_kernels(const tessera_plan& plan) {
  return plan.device.isa == TESSERA_ISA_AMX_BF16 && is_bfloat16(plan.problem) ? amx_table() : nullptr;
}

const AmxKernelTable* amx_decoder(const tessera_plan& plan) {
  const bool codes = has_codes_for_bfloat16(plan.problem) && can_multiply_codes();
  return plan.device.isa == TESSERA_ISA_AMX_BF16 && codes ? amx_table() : amx_kernels(plan);
}

tessera_status detect(tessera_device& device) {
  device = {};
  device.isa_limit = hardware().isa;
  choose_isa(device);
  device.kernel = TESSERA_KERNEL_AUTO;
  device.cores = device.threads = usable_cores();
  device.l1_bytes = hardware().l1_bytes;
  device.l2_bytes = hardware().l2_bytes;
  std::memcpy(device.name, hardware().name, sizeof device.name);
  if (const char* text = std::getenv("TESSERA_ISA")) TESSERA_RETURN_IF_ERROR(apply_isa(text, device));
  if (const char* text = std::getenv("TESSERA_NUM_THREADS")) TESSERA_RETURN_IF_ERROR(apply_threads(text, device));
  return ok();
}

tessera_status detect_once(tessera_device& device) {
  static std::mutex mutex;
  static tessera_device found;
  static bool known = false;
  const std::lock_guard lock(mutex);
  if (!known) TESSERA_RETURN_IF_ERROR(detect(found));
  known = true;
  device = found;
  return ok();
}

}  // namespace tessera::cpu
