// The CUDA text of score programs, compiled by NVRTC: no local memory, no spills.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/score/cuda_programs.hpp"
#include "core/score/cuda_text.hpp"
#include "cuda/cuda.hpp"
#include "cuda/prebuilt.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "cuda/runtime/nvrtc.hpp"
#include "tessera/tensor.hpp"

namespace tessera::cuda {
namespace {

// A kernel for each program that calls all that a program has, for one pair a thread.
std::string source_of_all(const std::vector<testing::CudaProgram>& programs) {
  std::string source = R"(#include "tessera/attention/score/program.cuh"
namespace tessera {
struct Sink {
  float* to;
  template <int kLoad, int kTensor, class... Index>
  TESSERA_DEVICE void add(bool inside, float adjoint, Index... index) {
    if (inside) to[kLoad] += adjoint * (0.0f + ... + static_cast<float>(index));
  }
};
template <class Program>
TESSERA_DEVICE void run(const ScoreProgramParams& p, const ProgramPlace& first, const float* s, float* out) {
  ProgramPlace at = first;
  at.j += threadIdx.x;
  const auto head = Program::head(p, at);
  const auto row = Program::row(p, head, at);
  const auto column = Program::column(p, head, at);
  const auto diagonal = Program::diagonal(p, head, at);
  const float x = s[at.j];
  Program::check(p, at);
  Sink sink{out};
  const bool visible = Program::visible(p, head, row, column, diagonal, at, x);
  out[64 + 2 * at.j] = visible ? Program::score(p, head, row, column, diagonal, at, x) : -infinity();
  const auto d_head = Program::gradient_head(p, at);
  out[65 + 2 * at.j] =
      Program::gradient(p, d_head, Program::gradient_row(p, d_head, at), Program::gradient_column(p, d_head, at),
                        Program::gradient_diagonal(p, d_head, at), at, s[2 * at.j], x, sink);
}
}
)";
  for (size_t n = 0; n < programs.size(); ++n) {
    const std::string name = "Program" + std::to_string(n);
    source += cuda_text(*programs[n].checked, programs[n].dtypes, {n % 2 == 0, n % 3 != 0 ? ~0u : 0u}, name.c_str());
    source +=
        "extern \"C\" __global__ void run_" + name +
        "(const __grid_constant__ tessera::ScoreProgramParams p, const __grid_constant__ tessera::ProgramPlace at,"
        " const float* s, float* out) {\n  tessera::run<tessera::program::" +
        name + ">(p, at, s, out);\n}\n";
  }
  return source;
}

class CudaScorePrograms : public ::testing::TestWithParam<int32_t> {};

TEST_P(CudaScorePrograms, CompileWithoutLocalMemory) {
  CompilerInfo compiler;
  const tessera_status found = open_compiler(compiler);
  if (found.code != TESSERA_OK) GTEST_SKIP() << found.message;
  const std::vector<testing::CudaProgram> programs = testing::cuda_programs(testing::kDrawnForNvrtc);
  Binary first;
  std::string log;
  const tessera_status status = compile_kernel(source_of_all(programs), "run_Program0", GetParam(), first, &log);
  ASSERT_EQ(status.code, TESSERA_OK) << status.message << "\n" << log;
  for (size_t n = 0; n < programs.size(); ++n) {
    Binary binary;
    ASSERT_TRUE(read_ptxas_log(log, "run_Program" + std::to_string(n), binary)) << programs[n].what;
    EXPECT_EQ(binary.stack_bytes, 0) << programs[n].what;
    EXPECT_EQ(binary.spill_bytes, 0) << programs[n].what;
  }
}

INSTANTIATE_TEST_SUITE_P(Score, CudaScorePrograms, ::testing::Values(80, 90),
                         [](const auto& arch) { return target_name(arch.param); });

struct Names {
  const char *table = "table", *doc = "doc", *factor = "factor";
};

// A problem of 8 heads with a program of a table [8, 2 S] and an int [B, S].
struct Programmed {
  Programmed(const char* score, const char* mask, int64_t batch, int64_t queries, int64_t keys, bool backward,
             bool captured_gradients = true, int64_t head_dim = 128, const Names& called = {}) {
    const tessera_program_name names[] = {{called.table, TESSERA_VALUE_FLOAT, 2},
                                          {called.doc, TESSERA_VALUE_INT, 2},
                                          {called.factor, TESSERA_VALUE_FLOAT, TESSERA_SCALAR_RANK}};
    const tessera_status made = tessera_program_create(score, mask, names, 3, &program);
    EXPECT_EQ(made.code, TESSERA_OK) << made.message;
    tessera_problem_init(&problem);
    problem.q = problem.o = layout(bfloat16, {batch, queries, 8, head_dim});
    problem.k = problem.v = layout(bfloat16, {batch, keys, 8, head_dim});
    problem.lse = layout(float32, {batch, 8, queries});
    problem.program = program;
    problem.captured[0] = layout(float32, {8, 2 * keys}), problem.captured[1] = layout(int32, {batch, keys});
    if (!backward) return;
    problem.direction = TESSERA_BACKWARD;
    problem.d_o = problem.o, problem.d_q = problem.q, problem.d_k = problem.k, problem.d_v = problem.v;
    if (captured_gradients) problem.d_captured[0] = problem.captured[0];
  }
  // Of sequences of any lengths up to the given ones.
  void pack() {
    const int64_t batch = problem.q.shape[0], queries = problem.q.shape[1], keys = problem.k.shape[1];
    const int64_t head_dim = problem.q.shape[3];
    problem.q = problem.o = layout(bfloat16, {batch * queries, 8, head_dim});
    problem.k = problem.v = layout(bfloat16, {batch * keys, 8, head_dim});
    problem.lse = layout(float32, {8, batch * queries});
    problem.cu_seqlens_q = problem.cu_seqlens_k = layout(int32, {batch + 1});
    problem.max_seqlen_q = queries, problem.max_seqlen_k = keys;
    if (problem.direction == TESSERA_FORWARD) return;
    problem.d_o = problem.o, problem.d_q = problem.q, problem.d_k = problem.k, problem.d_v = problem.v;
  }
  ~Programmed() { tessera_program_release(program); }
  Programmed(const Programmed&) = delete;
  Programmed& operator=(const Programmed&) = delete;

  // Calls visit(launch) for each launch of its plan.
  template <class Visit>
  void launches(int32_t arch, tessera_kernel kernel, const Visit& visit) const {
    tessera_device device{};
    ASSERT_EQ(tessera_device_cuda_arch(arch, &device).code, TESSERA_OK);
    device.kernel = kernel;
    tessera_plan plan{};
    const tessera_status status = tessera_make_plan(&problem, &device, &plan);
    ASSERT_EQ(status.code, TESSERA_OK) << status.message;
    LaunchList list;
    ASSERT_EQ(lower(plan, {}, nullptr, list).code, TESSERA_OK);
    for (const Launch& launch : list) visit(launch);
  }

  tessera_program* program = nullptr;
  tessera_problem problem{};
};

constexpr const char* kRelative = "s * factor + table[h, i - j + len_k]";
constexpr const char* kCapped = "factor * tanh((s + table[h, i - j + len_k]) / factor)";
constexpr const char* kHeadScale = "s * table[h, 0]";
constexpr const char* kDocuments = "j <= q_pos && doc[b, i] == doc[b, j]";

// The key in memory, and on disk the source: neither has lengths, batch, scalars or addresses.
std::vector<std::string> keys_of(const Programmed& call, tessera_kernel kernel) {
  std::vector<std::string> keys;
  call.launches(90, kernel, [&](const Launch& launch) {
    std::string key = source_of(launch.spec());
    for (int32_t n = 0; n < launch.values.count; ++n) {
      key += " " + std::to_string(launch.values.value[static_cast<size_t>(n)]);
    }
    keys.push_back(std::move(key));
  });
  return keys;
}

TEST(CudaProgramKeys, HaveNoLengthsAndNoData) {
  for (const bool backward : {false, true}) {
    const tessera_kernel kernel = backward ? TESSERA_KERNEL_BWD_SM80 : TESSERA_KERNEL_FWD_SM90;
    const Programmed call(kRelative, kDocuments, 1, 4096, 4096, backward);
    const std::vector<std::string> keys = keys_of(call, kernel);
    EXPECT_FALSE(keys.empty());
    EXPECT_EQ(keys, keys_of(Programmed(kRelative, kDocuments, 3, 4160, 6016, backward), kernel));
    EXPECT_NE(keys, keys_of(Programmed(kRelative, "", 1, 4096, 4096, backward), kernel));
  }
}

std::vector<std::string> sources_of(const Programmed& call, tessera_kernel kernel) {
  std::vector<std::string> sources;
  call.launches(90, kernel, [&](const Launch& launch) { sources.push_back(source_of(launch.spec())); });
  return sources;
}

TEST(CudaProgramKeys, HaveNoNames) {
  for (const bool backward : {false, true}) {
    const tessera_kernel kernel = backward ? TESSERA_KERNEL_BWD_SM80 : TESSERA_KERNEL_FWD_SM90;
    const Programmed call(kRelative, kDocuments, 1, 4096, 4096, backward);
    const Programmed renamed("s * a + z[h, i - j + len_k]", "j <= q_pos && m[b, i] == m[b, j]", 1, 4096, 4096, backward,
                             true, 128, {"z", "m", "a"});
    EXPECT_EQ(sources_of(call, kernel), sources_of(renamed, kernel));
  }
}

// The keys of the kernels that make lists of a mask's blocks.
std::vector<std::string> list_keys_of(const char* score, tessera_kernel kernel) {
  const Programmed call(score, kDocuments, 1, 4096, 4096, kernel == TESSERA_KERNEL_BWD_SM80);
  std::vector<std::string> lists;
  for (const std::string& key : keys_of(call, kernel)) {
    if (key.find("block_lists/program") != std::string::npos) lists.push_back(key);
  }
  EXPECT_EQ(lists.size(), 2u);
  return lists;
}

TEST(CudaProgramKeys, OfListsFollowTheMaskAlone) {
  const std::vector<std::string> forward = list_keys_of(kRelative, TESSERA_KERNEL_FWD_SM90),
                                 backward = list_keys_of(kRelative, TESSERA_KERNEL_BWD_SM80);
  EXPECT_EQ(forward, list_keys_of("s - factor", TESSERA_KERNEL_FWD_SM90));
  EXPECT_EQ(backward, list_keys_of("s - factor", TESSERA_KERNEL_BWD_SM80));
  EXPECT_EQ(backward, list_keys_of("", TESSERA_KERNEL_BWD_SM80));
}

// The kernels that a first call compiles if the prebuilt ones are installed, each once.
std::string compiled_by(const Programmed& call) {
  static const std::set<std::string> prebuilt = [] {
    std::set<std::string> sources;
    for (const PrebuiltKernel& kernel : prebuilt_kernels(90)) sources.insert(source_of(kernel.spec));
    return sources;
  }();
  std::set<std::string> seen;
  std::string names;
  call.launches(90, TESSERA_KERNEL_AUTO, [&](const Launch& launch) {
    const std::string source = source_of(launch.spec());
    if (!prebuilt.contains(source) && seen.insert(source).second) names += std::string(launch.name) + " ";
  });
  return names;
}

TEST(CudaProgramKernels, AFirstCallCompilesWhatReadsTheProgram) {
  const auto forward = [](const char* score, const char* mask, int64_t queries) {
    return compiled_by(Programmed(score, mask, 1, queries, 4096, false));
  };
  EXPECT_EQ(forward(kRelative, "", 4096), "fwd_sm90 ");
  EXPECT_EQ(forward(kRelative, kDocuments, 1), "decode_sm90 ");
  EXPECT_EQ(forward("", kDocuments, 4096), "program_bounds program_lists fwd_sm90 ");
  for (const int64_t head_dim : {64, 128, 256}) {
    for (const bool deterministic : {false, true}) {
      const auto backward = [&](const char* score, const char* mask, bool learned) {
        Programmed call(score, mask, 1, 4096, 4096, true, learned, head_dim);
        call.problem.deterministic = deterministic;
        return compiled_by(call);
      };
      const std::string kernel = head_dim > 128 ? "bwd_sm90_d256 " : "bwd_sm90 ";
      const bool lists = head_dim <= 128 || !deterministic;
      EXPECT_EQ(backward("", kDocuments, false), (lists ? "program_bounds program_lists " : "") + kernel) << head_dim;
      EXPECT_EQ(backward(kRelative, "", false), kernel) << head_dim;
      EXPECT_EQ(backward(kCapped, "", false), head_dim > 128 ? "bwd_sm80 " : "bwd_sm90 ") << head_dim;
      EXPECT_EQ(backward(kHeadScale, "", true), head_dim > 128 ? "bwd_sm80 " : "bwd_sm90 bwd_sm90_after_products ")
          << head_dim;
      EXPECT_EQ(backward(kHeadScale, "", false), kernel) << head_dim;
      const std::string by_diagonals = head_dim > 128 || deterministic ? "bwd_sm80 " : "bwd_sm90 ";
      EXPECT_EQ(backward(kRelative, "", true), by_diagonals) << head_dim;
      EXPECT_EQ(backward(kRelative, kDocuments, true), "program_bounds program_lists " + by_diagonals) << head_dim;
    }
  }
}

// What the kernels may spill: fwd_sm80 as without options (its row in families/fwd_sm80.cpp), fwd_sm90 as with most of
// them (compile_test.cpp).
struct SpillLimit {
  tessera_kernel kernel;
  int32_t arch, bytes;
};
constexpr SpillLimit kSpillLimits[] = {{TESSERA_KERNEL_FWD_SM80, 80, 180},
                                       {TESSERA_KERNEL_BWD_SM80, 80, 0},
                                       {TESSERA_KERNEL_BWD_SM90, 90, 0},
                                       {TESSERA_KERNEL_FWD_SM90, 90, 160},
                                       {TESSERA_KERNEL_DECODE_SM90, 90, 0}};

// Of bwd_sm90 at head size 128 if slopes depend on the score: values that a step reads once.
constexpr int kSpillsOfSlopes = 260;
// Of bwd_sm90 at head size 128 if gradients are summed by i - j beside a mask: 52 bytes, stored and loaded.
constexpr int kSpillsOfDiagonals = 128;
// Of bwd_sm90_d256: a score with a table and a mask beside it spill up to 16 bytes.
constexpr int kSpillsOfPairs = 16;

class CudaProgramKernels : public ::testing::TestWithParam<int32_t> {};

TEST_P(CudaProgramKernels, SpillNoMoreThanOthers) {
  CompilerInfo compiler;
  const tessera_status found = open_compiler(compiler);
  if (found.code != TESSERA_OK) GTEST_SKIP() << found.message;
  const int32_t arch = GetParam();
  for (const auto& [kernel, of_arch, most] : kSpillLimits) {
    if (of_arch != arch) continue;
    struct Given {
      const char *score, *mask;
      bool packed = false, deterministic = false;
      int64_t head_dim = 128;
      bool sloped = false, learned = false;
    };
    for (const auto& [score, mask, packed, deterministic, head_dim, sloped, learned] :
         {Given{kRelative, ""},
          {"", kDocuments},
          {"", kDocuments, true},
          {"", kDocuments, true, true},
          {"3.0 * tanh(s / factor)", ""},
          {kRelative, "", false, true},
          {kRelative, "", true},
          {kRelative, "", false, false, 64},
          {kRelative, "", true, true, 64},
          {"", kDocuments, false, true, 64},
          {kRelative, kDocuments, false, false, 192},
          {kRelative, kDocuments, true, false, 256},
          {kRelative, "", false, true, 256},
          {kCapped, kDocuments, false, false, 64, true},
          {kCapped, "", true, false, 64, true},
          {kCapped, kDocuments, false, false, 128, true},
          {kCapped, "", false, false, 128, true},
          {kHeadScale, kDocuments, false, true, 64, false, true},
          {kHeadScale, "", false, false, 128, false, true},
          {kHeadScale, kDocuments, true, true, 128, false, true},
          {"where(i > j, s * table[h, 0], s)", "", false, false, 64, true, true},
          {kRelative, "", false, false, 128, false, true},
          {kRelative, "", true, false, 96, false, true},
          {kRelative, kDocuments, true, false, 64, false, true},
          {"s * table[h, 0] + table[h, i - j + len_k]", "", false, false, 128, false, true},
          {kRelative, kDocuments, false, false, 128, false, true}}) {
      const bool sm90 = kernel == TESSERA_KERNEL_BWD_SM90, backward = sm90 || kernel == TESSERA_KERNEL_BWD_SM80;
      if (packed && kernel == TESSERA_KERNEL_DECODE_SM90) continue;  // it has no lists
      if (!backward && (deterministic || head_dim > 128)) continue;
      if (!sm90 && head_dim > 128) continue;
      if (sloped && !sm90) continue;
      Programmed call(score, mask, 1, kernel == TESSERA_KERNEL_DECODE_SM90 ? 1 : 4096, 4096, backward, !sm90 || learned,
                      head_dim);
      call.problem.deterministic = deterministic;
      if (packed) call.pack();
      call.launches(arch, kernel, [&](const Launch& launch) {
        if (!launch.program) return;
        Binary binary;
        std::string log;
        const KernelSpec spec = launch.spec();
        const tessera_status status = compile_kernel(source_of(spec), symbol_of(spec), arch, binary, &log);
        ASSERT_EQ(status.code, TESSERA_OK) << status.message << "\n" << log;
        const bool lists = std::string_view(spec.header).find("block_lists") != std::string_view::npos;
        EXPECT_LE(binary.spill_bytes, lists                               ? 0
                                      : head_dim > 128                    ? kSpillsOfPairs
                                      : sloped && head_dim > 96           ? kSpillsOfSlopes
                                      : learned && *mask && head_dim > 96 ? kSpillsOfDiagonals
                                                                          : most)
            << spec.name << " " << score << mask << " " << packed << deterministic << head_dim;
        if (lists) {
          EXPECT_EQ(binary.stack_bytes, 0) << spec.name << " " << mask << " " << packed;
        }
        EXPECT_EQ(binary.wgmma_serialized, 0) << log;
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Score, CudaProgramKernels, ::testing::Values(80, 90),
                         [](const auto& arch) { return target_name(arch.param); });

}  // namespace
}  // namespace tessera::cuda
