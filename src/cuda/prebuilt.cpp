#include "cuda/prebuilt.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <initializer_list>
#include <stdexcept>

#include "core/status.hpp"
#include "cuda/cuda.hpp"
#include "cuda/kernels.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace tessera::cuda {
namespace {

tessera_device device_of(int32_t arch) {
  constexpr int32_t kMultiprocessors = 132;  // of a large GPU: they decide whether one query row's keys are split
  tessera_device device{};
  if (const tessera_status status = tessera_device_cuda_arch(arch, &device); status.code != TESSERA_OK) {
    throw std::invalid_argument(status.message);
  }
  device.cores = kMultiprocessors;
  return device;
}

// ---- the table ----

// A problem that stands for many: what its launches are compiled for does not depend on lengths beyond these kinds, nor,
// but for kPrefill, on masks by position and on whether rows are dense or packed.
enum class Use {
  kPrefill,  // full and causal, of all lengths that Hopper's tiles tell apart, with key lengths, a window, packed
  kPagedPrefill,
  kDecode,       // one query a sequence, so few sequences that keys are split
  kDecodeBatch,  // so many that they are not
  kPagedDecode,  // likewise with pages
  kPagedDecodeBatch,
  kTraining,  // the backward pass
};

struct Row {
  Use use;
  int64_t head_dim;
  int32_t registers, spill_bytes, stack_bytes;  // of the kernel that multiplies
};
// clang-format off
constexpr Row kTable[] = {
    {Use::kPrefill, 64, 248, 0, 8},
    {Use::kPrefill, 96, 255, 24, 16},
    {Use::kPrefill, 128, 255, 180, 48},
    {Use::kPrefill, 192, 255, 0, 0},
    {Use::kPrefill, 256, 255, 0, 0},
    {Use::kPagedPrefill, 64, 248, 0, 0},
    {Use::kPagedPrefill, 128, 255, 132, 48},
    {Use::kDecode, 64, 216, 0, 0},
    {Use::kDecode, 128, 255, 0, 0},
    {Use::kDecodeBatch, 64, 220, 0, 0},
    {Use::kDecodeBatch, 128, 255, 0, 0},
    {Use::kPagedDecode, 64, 234, 0, 0},
    {Use::kPagedDecode, 128, 255, 0, 0},
    {Use::kPagedDecodeBatch, 64, 232, 0, 0},
    {Use::kPagedDecodeBatch, 128, 255, 0, 0},
    {Use::kTraining, 64, 255, 60, 24},
    {Use::kTraining, 96, 255, 60, 24},
    {Use::kTraining, 128, 255, 16, 16},
    {Use::kTraining, 192, 255, 60, 24},
    {Use::kTraining, 256, 255, 60, 24},
};
// clang-format on
constexpr int32_t kHopperRegisters = 168;  // as launched; two consumers then have 232, three 160, four 112
constexpr int32_t kCombineRegisters = 96, kBwdRowsRegisters = 72;

constexpr int32_t kDtypes[] = {TESSERA_BFLOAT16, TESSERA_FLOAT16};
constexpr int32_t kArchs[] = {80, 86, 89, 90, 100, 120};

// ---- what a row launches ----

tessera_layout contiguous(int32_t dtype, std::initializer_list<int64_t> shape) {
  tessera_layout layout{};
  layout.dtype = dtype;
  layout.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), layout.shape);
  int64_t stride = 1;
  for (int32_t axis = layout.rank; axis-- > 0;) {
    layout.strides[axis] = stride;
    stride *= layout.shape[axis];
  }
  return layout;
}

constexpr int64_t kKeys = 8192;

tessera_problem problem_of(const Row& row, int32_t dtype, int64_t keys = kKeys, bool causal = true) {
  constexpr int64_t kHeadsQ = 32, kHeadsKv = 8, kPage = 16;
  const bool paged = row.use == Use::kPagedPrefill || row.use == Use::kPagedDecode || row.use == Use::kPagedDecodeBatch;
  const bool prefill = row.use == Use::kPrefill || row.use == Use::kPagedPrefill || row.use == Use::kTraining;
  const bool large = row.use == Use::kDecodeBatch || row.use == Use::kPagedDecodeBatch;
  const int64_t batch = large ? 512 : 1, queries = prefill ? keys : 1, d = row.head_dim;
  tessera_problem p;
  tessera_problem_init(&p);
  p.q = p.o = contiguous(dtype, {batch, queries, kHeadsQ, d});
  p.k = p.v = contiguous(dtype, {paged ? batch * keys / kPage : batch, paged ? kPage : keys, kHeadsKv, d});
  p.lse = contiguous(TESSERA_FLOAT32, {batch, kHeadsQ, queries});
  p.causal = causal;
  if (paged) {
    p.seqused_k = contiguous(TESSERA_INT32, {batch});
    p.page_table = contiguous(TESSERA_INT32, {batch, keys / kPage});
  }
  if (row.use == Use::kTraining) {
    p.direction = TESSERA_BACKWARD;
    p.d_o = p.d_q = p.q, p.d_k = p.k, p.d_v = p.v;
  }
  return p;
}

// The same queries and keys as those of several sequences.
tessera_problem packed(tessera_problem p) {
  for (tessera_layout* tensor : {&p.q, &p.k, &p.v, &p.o}) {
    const int64_t* shape = tensor->shape;
    *tensor = contiguous(tensor->dtype, {shape[0] * shape[1], shape[2], shape[3]});
  }
  p.lse = contiguous(TESSERA_FLOAT32, {p.q.shape[1], p.q.shape[0]});
  constexpr int64_t kSequences = 8;
  p.cu_seqlens_q = p.cu_seqlens_k = contiguous(TESSERA_INT32, {kSequences + 1});
  return p;
}

// The same with as many keys of each sequence as a tensor says.
tessera_problem with_key_lengths(tessera_problem p) {
  p.seqused_k = contiguous(TESSERA_INT32, {p.q.shape[0]});
  return p;
}

tessera_problem windowed(tessera_problem p) {
  constexpr int64_t kWindow = 1024;
  p.window_left = kWindow;
  if (!p.causal) p.window_right = kWindow;
  return p;
}

std::vector<tessera_problem> problems_of(const Row& row, int32_t dtype) {
  if (row.use != Use::kPrefill) return {problem_of(row, dtype)};
  std::vector<tessera_problem> problems;
  for (const bool causal : {true, false}) {
    for (int64_t keys = 512; keys <= 2 * kKeys; keys *= 2) {
      const tessera_problem dense = problem_of(row, dtype, keys, causal);
      problems.push_back(dense);
      problems.push_back(with_key_lengths(dense));
    }
    problems.push_back(windowed(problem_of(row, dtype, kKeys, causal)));
    problems.push_back(packed(problem_of(row, dtype, kKeys, causal)));
  }
  return problems;
}

std::vector<KernelSpec> launches_of(const tessera_problem& problem, int32_t arch) {
  const tessera_device device = device_of(arch);
  tessera_plan plan;
  tessera_status status = tessera_make_plan(&problem, &device, &plan);
  LaunchList list;
  if (status.code == TESSERA_OK) status = lower(plan, tessera_buffers{}, nullptr, list);
  if (status.code != TESSERA_OK) throw std::logic_error(status.message);
  return collect(list);
}

}  // namespace

std::vector<PrebuiltKernel> prebuilt_kernels(int32_t arch) {
  std::vector<PrebuiltKernel> kernels;
  const auto add = [&kernels](const Row& row, const KernelSpec& spec) {
    const auto same = [&spec](const PrebuiltKernel& kernel) {
      return std::strcmp(kernel.spec.name, spec.name) == 0 && kernel.spec.config == spec.config;
    };
    if (std::any_of(kernels.begin(), kernels.end(), same)) return;
    const auto is = [&spec](const char* name) { return std::strcmp(spec.name, name) == 0; };
    if (is("combine")) {
      kernels.push_back({spec, kCombineRegisters});
    } else if (is("bwd_rows")) {
      kernels.push_back({spec, kBwdRowsRegisters});
    } else if (is("fwd_sm90")) {
      kernels.push_back({spec, kHopperRegisters});
    } else {
      kernels.push_back({spec, row.registers, row.spill_bytes, row.stack_bytes});
    }
  };
  for (const Row& row : kTable) {
    for (const int32_t dtype : kDtypes) {
      for (const tessera_problem& problem : problems_of(row, dtype)) {
        for (const KernelSpec& spec : launches_of(problem, arch)) add(row, spec);
      }
    }
  }
  // Parts that a caller merges are often float32, and so is what comes out.
  kernels.push_back({spec_of(CombineConfig{Dtype::kFloat32, Dtype::kFloat32}), kCombineRegisters});
  return kernels;
}

std::vector<int32_t> prebuilt_archs() { return {std::begin(kArchs), std::end(kArchs)}; }

tessera_status warm(Cache& cache, const std::vector<int32_t>& archs, const std::function<void(const Warmed&)>& report) {
  int64_t done = 0, total = 0;
  for (const int32_t arch : archs) total += static_cast<int64_t>(prebuilt_kernels(arch).size());
  for (const int32_t arch : archs) {
    for (const PrebuiltKernel& kernel : prebuilt_kernels(arch)) {
      Binary binary;
      CacheKey key;
      Origin origin{};
      const auto begin = std::chrono::steady_clock::now();
      TESSERA_RETURN_IF_ERROR(build_binary(kernel.spec, arch, cache, binary, &origin, &key));
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      ++done;
      report({kernel, arch, key, binary, origin, done, total, seconds.count()});
    }
  }
  return ok();
}

}  // namespace tessera::cuda
