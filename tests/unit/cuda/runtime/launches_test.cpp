// The work that a call launches in its stream, recorded by tests/fake_driver.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cuda/kernels.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace tessera::cuda {
namespace {

template <class Function>
Function* fake(const char* name) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void* const function = library ? dlsym(library, name) : nullptr;
  if (!function) throw std::runtime_error("wants the driver of tests/fake_driver: run by ctest");
  return reinterpret_cast<Function*>(function);
}
std::string told() { return fake<const char*()>("fake_cuda_log")(); }
void refuse(const char* name) { fake<void(const char*)>("fake_cuda_refuse")(name); }
void* stream(uintptr_t number) { return reinterpret_cast<void*>(number); }
void capture(uintptr_t number) { fake<void(void*)>("fake_cuda_capture")(stream(number)); }

struct Asked {
  uintptr_t kernel;
  int argument;
  uint32_t grid = 1;
  bool begins_early = false;
};

tessera_status run(uintptr_t stream_number, const std::vector<Asked>& kernels, uintptr_t cleared = 0, int ordinal = 0) {
  tessera_device device{};
  device.ordinal = ordinal;
  Launches launches(device, stream(stream_number));
  if (const tessera_status status = launches.begin(); status.code != TESSERA_OK) return status;
  if (cleared) launches.clear(stream(cleared));
  for (const Asked& launch : kernels) {
    const Kernel kernel{reinterpret_cast<CUkernel>(launch.kernel), "fwd_test", 128, 0, launch.begins_early};
    launches.add(kernel, Grid{launch.grid}, &launch.argument);
  }
  return launches.run();
}
// What such a call did.
std::string call(uintptr_t stream_number, const std::vector<Asked>& kernels, uintptr_t cleared = 0, int ordinal = 0) {
  const tessera_status status = run(stream_number, kernels, cleared, ordinal);
  return status.code == TESSERA_OK ? told() : std::string("refused: ") + status.message;
}

// A thread keeps its graphs. What ends it left to tell is in its test's way no more.
class CudaLaunches : public ::testing::Test {
 protected:
  void SetUp() override { told(), refuse(""), capture(0); }
  static void in_new_thread(const std::function<void()>& test) { std::thread(test).join(); }
};
using CudaLaunchesOneByOne = CudaLaunches;

std::string number_of(const std::string& text) {  // "graph N made, ..."
  const size_t at = text.find("graph ") + 6;
  return text.substr(at, text.find(' ', at) - at);
}

// Calls of a form until its graph is made; its number.
std::string make_graph(uintptr_t stream_number, const std::vector<Asked>& kernels, uintptr_t cleared = 0,
                       int ordinal = 0) {
  for (int n = 0; n < Launches::kCallsBeforeGraph; ++n) {
    const std::string did = call(stream_number, kernels, cleared, ordinal);
    EXPECT_EQ(did.find("graph"), std::string::npos) << "call " << n + 1 << ": " << did;
  }
  const std::string made = call(stream_number, kernels, cleared, ordinal), n = number_of(made);
  EXPECT_EQ(made.substr(0, made.find(',')), "graph " + n + " made") << made;
  const std::string uploaded = call(stream_number, kernels, cleared, ordinal);
  EXPECT_EQ(uploaded.substr(0, uploaded.find('\n')), "graph " + n + " uploaded") << uploaded;
  return n;
}

// A form's first calls go one by one, so that many a stream's few never pay for a graph; then it is made, a step a
// call, while calls still go one by one.
TEST_F(CudaLaunches, AreAGraphWhereItPays) {
  in_new_thread([] {
    const auto launches = [](int n) { return std::vector<Asked>{{1, n}, {2, 2 * n, 5}}; };
    const auto one_by_one = [](int n) {
      return "11: kernel 1(" + std::to_string(n) + ") x 1\n11: kernel 2(" + std::to_string(2 * n) + ") x 5\n";
    };
    int n = 0;
    for (; n < Launches::kCallsBeforeGraph; ++n) EXPECT_EQ(call(11, launches(n)), one_by_one(n));
    const std::string made = call(11, launches(n)), graph = number_of(made);
    EXPECT_EQ(made, "graph " + graph + " made, priority -11\n" + one_by_one(n));
    ++n;
    EXPECT_EQ(call(11, launches(n)), "graph " + graph + " uploaded\n" + one_by_one(n));
    EXPECT_EQ(call(11, {{1, 12}, {2, 22, 7}}), "11: graph " + graph + ": kernel 1(12) x 1 kernel 2(22) x 7\n");
    EXPECT_EQ(call(11, {{1, 13}, {3, 23}}), "11: kernel 1(13) x 1\n11: kernel 3(23) x 1\n") << "others";
    EXPECT_EQ(call(11, {{1, 14}, {2, 24}}), "11: graph " + graph + ": kernel 1(14) x 1 kernel 2(24) x 1\n");
  });
  EXPECT_NE(told().find("destroyed"), std::string::npos) << "with its thread";
}

TEST_F(CudaLaunches, ClearAWordFirst) {
  in_new_thread([] {
    EXPECT_EQ(call(11, {{1, 10}}, 4096), "11: 1 words at 4096 become 0\n11: kernel 1(10) x 1\n");
    for (int n = 1; n < Launches::kCallsBeforeGraph; ++n) call(11, {{1, 10}}, 4096);
    const std::string made = call(11, {{1, 11}}, 4160), n = number_of(made);
    EXPECT_EQ(made, "graph " + n + " made, priority -11\n11: 1 words at 4160 become 0\n11: kernel 1(11) x 1\n");
    call(11, {{1, 11}}, 4160);
    EXPECT_EQ(call(11, {{1, 12}}, 4224), "11: graph " + n + ": 0 at 4224 kernel 1(12) x 1\n");
    EXPECT_EQ(call(11, {{1, 13}}), "11: kernel 1(13) x 1\n") << "another form's first call";
  });
}

TEST_F(CudaLaunches, AKernelThatWaitsByItselfMayBeginEarly) {
  in_new_thread([] {
    EXPECT_EQ(call(11, {{1, 7}, {2, 8, 3, true}}), "11: kernel 1(7) x 1\n11: kernel 2(8) x 3 attribute 6\n");
  });
}

// ---- lists of launches ----

KernelSpec spec_of_combine(const void* config) { return spec_of(*static_cast<const CombineConfig*>(config)); }
constexpr CombineConfig kConfig{Dtype::kFloat16, Dtype::kFloat32, false};

TEST(CudaLaunchList, KeepsWhatIsLaunchedAndNothingWithoutBlocks) {
  LaunchList list;
  CombineConfig config = kConfig;
  int argument = 10;
  list.add("combine", config, spec_of_combine, Grid{0}, argument);
  list.add("combine", config, spec_of_combine, Grid{2, 0}, argument);
  list.add("combine", config, spec_of_combine, Grid{5}, argument);
  config = {}, argument = 0;  // the list has copies
  ASSERT_EQ(list.size(), 1);
  EXPECT_EQ(list[0].grid.x, 5u);
  EXPECT_EQ(std::memcmp(list[0].params, std::array{10}.data(), sizeof(int)), 0);
  EXPECT_EQ(list[0].spec().config, config_text(kConfig));
  EXPECT_EQ(list[0].values.value, config_values(kConfig).value);
  ASSERT_EQ(collect(list).size(), 1u);
  EXPECT_EQ(collect(list)[0].config, config_text(kConfig));
}

TEST_F(CudaLaunches, OfAnEmptyListAreNone) {
  in_new_thread([] {
    tessera_device device{};
    for (int n = 0; n < Launches::kCallsBeforeGraph + 3; ++n) {
      Launches launches(device, stream(11));
      ASSERT_EQ(launches.begin().code, TESSERA_OK);
      LaunchList list(launches.driver());
      list.clear(stream(4096));
      EXPECT_EQ(submit(list, launches).code, TESSERA_OK);
      EXPECT_EQ(told(), "");
    }
  });
}

TEST_F(CudaLaunches, AreCapturedOneByOne) {
  in_new_thread([] {
    const auto while_captured = [] {
      capture(11);
      for (int n = 0; n < 3; ++n) EXPECT_EQ(call(11, {{1, 11}}), "11: kernel 1(11) x 1\n");
      capture(0);
    };
    for (int n = 0; n < Launches::kCallsBeforeGraph; ++n) call(11, {{1, 10}});
    while_captured();
    const std::string made = call(11, {{1, 10}}), n = number_of(made);
    EXPECT_TRUE(made.starts_with("graph " + n + " made")) << made;
    while_captured();  // between the steps
    EXPECT_EQ(call(11, {{1, 10}}), "graph " + n + " uploaded\n11: kernel 1(10) x 1\n");
    while_captured();
    EXPECT_EQ(call(11, {{1, 12}}), "11: graph " + n + ": kernel 1(12) x 1\n");
  });
}

TEST_F(CudaLaunches, HaveAGraphForEachStreamAndThread) {
  in_new_thread([] {
    const std::string a = make_graph(11, {{1, 0}}), b = make_graph(12, {{1, 0}}), c = make_graph(0, {{1, 0}});
    EXPECT_TRUE(a != b && b != c && a != c);
    in_new_thread([] { EXPECT_EQ(call(11, {{1, 2}}), "11: kernel 1(2) x 1\n"); });
    EXPECT_EQ(call(11, {{1, 2}}), "11: graph " + a + ": kernel 1(2) x 1\n");
    EXPECT_EQ(call(12, {{1, 3}}), "12: graph " + b + ": kernel 1(3) x 1\n");
    EXPECT_EQ(call(0, {{1, 4}}), "0: graph " + c + ": kernel 1(4) x 1\n");
  });
}

// Whichever is current, which it is again afterwards. Streams from 1000 on are the second GPU's.
TEST_F(CudaLaunches, GoToTheGpuOfTheirPlan) {
  in_new_thread([] {
    void *before = nullptr, *after = nullptr;
    fake<int(void**)>("cuCtxGetCurrent")(&before);
    for (const uintptr_t stream : {1011, 0}) {
      const std::string name = "GPU 1, " + std::to_string(stream);
      EXPECT_EQ(call(stream, {{1, 0}}, 4096, 1), name + ": 1 words at 4096 become 0\n" + name + ": kernel 1(0) x 1\n");
      call(stream, {{9, 0}}, 4096, 1);
      const std::string n = make_graph(stream, {{2, 1}}, 4096, 1);
      EXPECT_EQ(call(stream, {{2, 1}}, 4096, 1), name + ": graph " + n + ": 0 at 4096 kernel 2(1) x 1\n");
      EXPECT_EQ(call(stream ? 11 : 0, {{2, 2}}, 4096), (stream ? "11" : "0") +
                                                           std::string(": 1 words at 4096 become 0\n") +
                                                           (stream ? "11" : "0") + ": kernel 2(2) x 1\n")
          << "the first GPU's first call";
      EXPECT_EQ(call(stream, {{2, 3}}, 4160, 1), name + ": graph " + n + ": 0 at 4160 kernel 2(3) x 1\n");
    }
    EXPECT_EQ(call(1011, {{1, 4}}), "refused: executor.stream: belongs to GPU 1, must be the plan's, GPU 0");
    EXPECT_EQ(call(11, {{1, 5}}, 0, 1), "refused: executor.stream: belongs to GPU 0, must be the plan's, GPU 1");
    fake<int(void**)>("cuCtxGetCurrent")(&after);
    EXPECT_EQ(before, after);
  });
}

TEST_F(CudaLaunches, KeepTheGraphsUsedLast) {
  in_new_thread([] {
    std::vector<std::string> numbers;
    constexpr uintptr_t kMost = 16;
    for (uintptr_t n = 0; n < kMost; ++n) numbers.push_back(make_graph(11 + n, {{1, 0}}));
    for (uintptr_t n = 0; n < kMost; ++n) {
      EXPECT_EQ(call(11 + n, {{1, 2}}), std::to_string(11 + n) + ": graph " + numbers[n] + ": kernel 1(2) x 1\n");
    }
    call(11, {{1, 3}});  // not the oldest any more
    EXPECT_EQ(call(40, {{1, 4}}), "graph " + numbers[1] + " destroyed\n40: kernel 1(4) x 1\n");
    EXPECT_EQ(call(11, {{1, 5}}), "11: graph " + numbers[0] + ": kernel 1(5) x 1\n");
    EXPECT_EQ(call(12, {{1, 6}}), "graph " + numbers[2] + " destroyed\n12: kernel 1(6) x 1\n");
  });
}

// The call goes one by one, and so does its form from then on: nothing is lost, done twice or tried for ever.
TEST_F(CudaLaunches, GoOneByOneWhereADriverRefusesGraphs) {
  const auto one_by_one = [](int n) {
    return "11: 1 words at 4096 become 0\n11: kernel 1(" + std::to_string(n) + ") x 1\n";
  };
  for (const char* const name :
       {"cuGraphCreate", "cuGraphAddMemsetNode", "cuGraphAddKernelNode_v2", "cuGraphInstantiateWithFlags",
        "cuGraphUpload", "cuGraphExecMemsetNodeSetParams", "cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch"}) {
    in_new_thread([&] {
      refuse(name);
      for (int n = 0; n < Launches::kCallsBeforeGraph + 8; ++n) {
        std::string did = call(11, {{1, n}}, 4096);
        while (did.starts_with("graph ")) did.erase(0, did.find('\n') + 1);  // made, uploaded, destroyed
        EXPECT_EQ(did, one_by_one(n)) << name;
      }
      refuse("");
      EXPECT_EQ(call(11, {{1, 20}}, 4096), one_by_one(20)) << name;
    });
    told();
  }
  // One that served, too.
  for (const char* const name :
       {"cuGraphExecMemsetNodeSetParams", "cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch"}) {
    in_new_thread([&] {
      const std::string n = make_graph(11, {{1, 0}}, 4096);
      refuse(name);
      EXPECT_EQ(call(11, {{1, 10}}, 4096), "graph " + n + " destroyed\n" + one_by_one(10)) << name;
      refuse("");
      EXPECT_EQ(call(11, {{1, 20}}, 4096), one_by_one(20)) << name;
    });
  }
}

TEST_F(CudaLaunches, SayWhichKernelADriverRefuses) {
  in_new_thread([] {
    make_graph(11, {{1, 10}});
    refuse("cuLaunchKernel");
    EXPECT_EQ(run(11, {{1, 11}}).code, TESSERA_OK) << "a graph's launch is none of it";
    EXPECT_EQ(call(12, {{1, 11}}), "refused: fwd_test: CUDA_ERROR_PRETENDED (1), the driver's words");
    refuse("cuMemsetD32Async");
    EXPECT_EQ(call(13, {{1, 11}}, 4096), "refused: cuMemsetD32Async: CUDA_ERROR_PRETENDED (1), the driver's words");
    refuse("");
  });
}

using CudaLaunchesFirst = CudaLaunches;

// With TESSERA_CUDA_GRAPHS=first.
TEST_F(CudaLaunchesFirst, AreAGraphFromTheFirstCallOn) {
  in_new_thread([] {
    const std::string first = call(11, {{1, 10}}, 4096), n = number_of(first);
    EXPECT_EQ(first, "graph " + n + " made, priority -11\ngraph " + n + " uploaded\n11: graph " + n +
                         ": 0 at 4096 kernel 1(10) x 1\n");
    EXPECT_EQ(call(11, {{1, 11}}, 4160), "11: graph " + n + ": 0 at 4160 kernel 1(11) x 1\n");
  });
}

// With TESSERA_CUDA_GRAPHS=0.
TEST_F(CudaLaunchesOneByOne, IfTheEnvironmentSaysSo) {
  in_new_thread([] {
    for (int n = 0; n < Launches::kCallsBeforeGraph + 4; ++n) {
      EXPECT_EQ(call(11, {{1, n}}), "11: kernel 1(" + std::to_string(n) + ") x 1\n");
    }
  });
}

}  // namespace
}  // namespace tessera::cuda
