#include "cuda/prebuilt.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <initializer_list>
#include <stdexcept>

#include "core/status.hpp"
#include "cuda/cuda.hpp"
#include "cuda/kernels.hpp"
#include "cuda/registry.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace tessera::cuda {
namespace {

tessera_device device_of(int32_t arch) {
  constexpr int32_t kMultiprocessors = 132;  // of a large GPU; they decide whether the keys of one query row are split
  tessera_device device{};
  if (const tessera_status status = tessera_device_cuda_arch(arch, &device); status.code != TESSERA_OK) {
    throw std::invalid_argument(status.message);
  }
  device.cores = kMultiprocessors;
  return device;
}

constexpr int32_t kDtypes[] = {TESSERA_BFLOAT16, TESSERA_FLOAT16, TESSERA_FLOAT8_E4M3};

// ---- launches of a row ----

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

constexpr int64_t kKeys = 8192, kFewKeys = 2048;

tessera_problem problem_of(const PrebuiltRow& row, int32_t dtype, int64_t keys = kKeys, bool causal = true) {
  constexpr int64_t kHeadsQ = 32, kHeadsKv = 8, kPage = 16;
  const bool paged = row.use == Use::kPagedPrefill || row.use == Use::kPagedDecode || row.use == Use::kPagedDecodeBatch;
  const bool prefill = row.use == Use::kPrefill || row.use == Use::kPagedPrefill || row.use == Use::kTraining;
  const bool large = row.use == Use::kDecodeBatch || row.use == Use::kPagedDecodeBatch;
  const int64_t batch = large ? 512 : 1, queries = prefill ? keys : 1, d = row.head_dim;
  tessera_problem p;
  tessera_problem_init(&p);
  p.q = p.o = contiguous(dtype, {batch, queries, kHeadsQ, d});
  if (tessera_dtype_bytes(dtype) == 1) p.o.dtype = TESSERA_BFLOAT16;
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

// The same queries and keys as several packed sequences.
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

// The same with a tensor of key lengths.
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

// The same with k and v of 8 bits, and scales that all tokens of a head have in common.
tessera_problem with_codes(tessera_problem p) {
  p.k.dtype = p.v.dtype = TESSERA_FLOAT8_E4M3;
  return p;
}

// As many short sequences as training has, with a KV head for each query head.
tessera_problem short_training(const PrebuiltRow& row, int32_t dtype) {
  constexpr int64_t kBatch = 64, kRows = 512, kHeads = 32;
  tessera_problem p = problem_of(row, dtype);
  p.q = p.k = p.v = p.o = contiguous(dtype, {kBatch, kRows, kHeads, row.head_dim});
  p.d_o = p.d_q = p.d_k = p.d_v = p.q;
  p.lse = contiguous(TESSERA_FLOAT32, {kBatch, kHeads, kRows});
  return p;
}

std::vector<tessera_problem> problems_of(const PrebuiltRow& row, int32_t dtype) {
  if (row.use == Use::kPagedDecode) return {problem_of(row, dtype), problem_of(row, dtype, kFewKeys)};
  if (row.use == Use::kTraining) return {problem_of(row, dtype), short_training(row, dtype)};
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

// Whether a row of the family is prebuilt for the dtype. What other families serve elsewhere, 16 bits, is prebuilt for
// every architecture.
bool builds(const Family& family, int32_t dtype, int32_t arch) {
  const bool serves = arch >= family.supports.oldest_arch && arch <= family.supports.newest_arch;
  return (family.supports.dtypes >> dtype & 1) != 0 && (serves || tessera_dtype_bytes(dtype) > 1);
}
// Whether the same rows are prebuilt for 8-bit caches, under the queries of engines: those of a family for this
// architecture alone. The others, ten kernels for each architecture, are compiled on first use.
bool builds_codes(const Family& family, int32_t dtype, int32_t arch) {
  return dtype == TESSERA_BFLOAT16 && (family.supports.cache_dtypes >> TESSERA_FLOAT8_E4M3 & 1) != 0 &&
         arch == family.supports.newest_arch;
}

// Programs of training: what they launch beside the kernels that are compiled with them serves every program.
constexpr struct {
  const char *score, *mask;
  bool learned;  // the gradient of its tensor is requested
} kPrograms[] = {{"s+x[j]", "", false},
                 {"tanh(s*x[j])", "", false},
                 {"s*x[j]", "", true},
                 {"", "x[i]<x[j]", false},
                 {"s*x[j]", "x[i]<x[j]", true}};

struct Planned {
  const Family* family;
  std::vector<KernelSpec> launches;
};
// A family for one architecture is requested by name there, even if another family has precedence.
Planned plan_of(const Family& of, const tessera_problem& problem, int32_t arch) {
  tessera_device device = device_of(arch);
  tessera_plan plan;
  tessera_status status{TESSERA_UNSUPPORTED, {}};
  if (of.supports.newest_arch == arch) {
    core::set_family(device, of);
    status = tessera_make_plan(&problem, &device, &plan);
  }
  if (status.code != TESSERA_OK) {
    device = device_of(arch);
    status = tessera_make_plan(&problem, &device, &plan);
  }
  LaunchList list;
  if (status.code == TESSERA_OK) status = lower(plan, tessera_buffers{}, nullptr, list);
  if (status.code != TESSERA_OK) throw std::logic_error(status.message);
  return {find_family(plan.family), collect(list)};
}

// Limits of a kernel that a problem of `row` launches: its own, or those of the row of the family that has chosen it.
Limits limits_of(const KernelSpec& spec, const Family& family, const PrebuiltRow& row) {
  if (spec.limits.registers > 0) return spec.limits;
  for (const PrebuiltRow& own : family.prebuilt) {
    if (own.use == row.use && own.head_dim == row.head_dim) return own.limits;
  }
  throw std::logic_error(std::string(family.name) + ": takes a prebuilt problem that it has no row for");
}

}  // namespace

std::vector<PrebuiltKernel> prebuilt_kernels(const Target& target) {
  std::vector<PrebuiltKernel> kernels;
  const auto add = [&kernels](const KernelSpec& spec, const Limits& limits) {
    const auto same = [&spec](const PrebuiltKernel& kernel) {
      return std::strcmp(kernel.spec.name, spec.name) == 0 && kernel.spec.config == spec.config;
    };
    if (std::none_of(kernels.begin(), kernels.end(), same)) kernels.push_back({spec, limits});
  };
  for (const int32_t arch : target.ptx ? ptx_users(target.arch) : std::vector<int32_t>{target.arch}) {
    for (const Family* family : families()) {
      for (const PrebuiltRow& row : family->prebuilt) {
        for (const int32_t dtype : kDtypes) {
          if (!builds(*family, dtype, arch)) continue;
          const auto add_problem = [&](const tessera_problem& problem) {
            const Planned planned = plan_of(*family, problem, arch);
            for (const KernelSpec& spec : planned.launches) add(spec, limits_of(spec, *planned.family, row));
          };
          for (const tessera_problem& problem : problems_of(row, dtype)) {
            add_problem(problem);
            if (builds_codes(*family, dtype, arch)) add_problem(with_codes(problem));
          }
          if (row.use != Use::kTraining) continue;
          for (const auto& [score, mask, learned] : kPrograms) {
            tessera_problem problem = problem_of(row, dtype);
            const tessera_program_name x{"x", TESSERA_VALUE_FLOAT, 1};
            tessera_program* program = nullptr;
            tessera_program_create(score, mask, &x, 1, &program);
            problem.program = program;
            problem.captured[0] = contiguous(TESSERA_FLOAT32, {kKeys});
            if (learned) problem.d_captured[0] = problem.captured[0];
            for (problem.deterministic = 0; problem.deterministic < 2; ++problem.deterministic) add_problem(problem);
            tessera_program_release(program);
          }
        }
      }
    }
  }
  // The parts that a caller merges are often float32, and so is the result.
  const KernelSpec merge = spec_of(CombineConfig{Dtype::kFloat32, Dtype::kFloat32, false});
  add(merge, merge.limits);
  for (const Dtype dtype : {Dtype::kFloat16, Dtype::kBFloat16}) {
    for (const AppendConfig& config : {AppendConfig{dtype, dtype, false}, AppendConfig{dtype, dtype, true},
                                       AppendConfig{dtype, Dtype::kFloat8E4M3, true}}) {
      const KernelSpec append = spec_of(config);
      add(append, append.limits);
    }
  }
  // What a rank of several moves: messages, sums of gradients, their rounding; statistics may be unaligned.
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16}) {
    for (const MoveRowsConfig& config :
         {MoveRowsConfig{dtype, dtype, false, true}, MoveRowsConfig{dtype, Dtype::kFloat32, true, true},
          MoveRowsConfig{Dtype::kFloat32, dtype, false, true}}) {
      const KernelSpec moves = spec_of(config);
      add(moves, moves.limits);
    }
  }
  const KernelSpec statistics = spec_of(MoveRowsConfig{Dtype::kFloat32, Dtype::kFloat32, false, false});
  add(statistics, statistics.limits);
  const KernelSpec words = spec_of(WriteWordsConfig{kWriteWordsMost});
  add(words, words.limits);
  for (const bool paged : {false, true}) {
    const KernelSpec indices = spec_of(PrefixIndicesConfig{paged});
    add(indices, indices.limits);
  }
  return kernels;
}

tessera_status warm(Cache& cache, const std::vector<Target>& targets,
                    const std::function<void(const Warmed&)>& report) {
  int64_t done = 0, total = 0;
  for (const Target& target : targets) total += static_cast<int64_t>(prebuilt_kernels(target).size());
  for (const Target& target : targets) {
    for (const PrebuiltKernel& kernel : prebuilt_kernels(target)) {
      Binary binary;
      CacheKey key;
      Origin origin{};
      const auto begin = std::chrono::steady_clock::now();
      TESSERA_RETURN_IF_ERROR(build_binary(kernel.spec, target, cache, binary, &origin, &key));
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      ++done;
      report({kernel, target, key, binary, origin, done, total, seconds.count()});
    }
  }
  return ok();
}

}  // namespace tessera::cuda
