// The backward pass with each option by bwd_sm90 and by bwd_sm80, through the C interface, in the steady state: TFLOP/s on the
// visible area. Links the library alone; libcuda is opened at run time.
// "options_time warm N" compiles the kernels of case N into the cache, and no more: all of them at once take a few seconds.
//   c++ -std=c++20 -O2 -Iinclude -Isrc -I. lab/bwd_sm90/options_time.cpp build/gpu/src/libtessera.a -ldl -pthread
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/gpu_call.hpp"
#include "core/fields.hpp"
#include "tessera/tessera.h"

namespace {

using namespace bench;
using Address = unsigned long long;

struct Case {
  const char* name;
  int64_t batch, rows, heads, heads_kv, head_dim, head_dim_v;
  bool causal;
  double softcap = 0, dropout = 0;
  bool alibi = false, mask = false;
  int32_t bias = -1;
  bool d_bias = false;
  int64_t bias_batches = 1;
  int64_t window = -1;
};

constexpr Case kCases[] = {
    {"D 128 full", 4, 4096, 16, 16, 128, 128, false},
    {"D 128 causal", 4, 4096, 16, 16, 128, 128, true},
    {"ALiBi, causal", 4, 4096, 16, 16, 128, 128, true, 0, 0, true},
    {"softcap 50, causal", 4, 4096, 16, 16, 128, 128, true, 50},
    {"dropout 0.1", 4, 4096, 16, 16, 128, 128, false, 0, 0.1},
    {"dropout 0.1, causal", 4, 4096, 16, 16, 128, 128, true, 0, 0.1},
    {"mask [1, 1, S, S]", 4, 4096, 16, 16, 128, 128, false, 0, 0, false, true},
    {"bias [1, H, S, S] bf16", 4, 4096, 16, 16, 128, 128, false, 0, 0, false, false, TESSERA_BFLOAT16},
    {"bias [1, H, S, S] f32", 4, 4096, 16, 16, 128, 128, false, 0, 0, false, false, TESSERA_FLOAT32},
    {"bias, dBias [1, H, S, S]", 4, 4096, 16, 16, 128, 128, false, 0, 0, false, false, TESSERA_BFLOAT16, true},
    {"bias, dBias [B, H, S, S]", 4, 4096, 16, 16, 128, 128, false, 0, 0, false, false, TESSERA_BFLOAT16, true, 4},
    {"D 64 full", 4, 4096, 32, 32, 64, 64, false},
    {"D 64 dropout 0.1, causal", 4, 4096, 32, 32, 64, 64, true, 0, 0.1},
    {"D 64 bias [1, H, S, S] bf16", 4, 4096, 32, 32, 64, 64, false, 0, 0, false, false, TESSERA_BFLOAT16},
    {"D 96 causal", 4, 4096, 20, 20, 96, 96, true},
    {"D 128 causal, GQA 32/8", 4, 4096, 32, 8, 128, 128, true},
    {"D 128 window 1024 of 16384", 1, 16384, 16, 16, 128, 128, true, 0, 0, false, false, -1, false, 1, 1024},
    {"D 192 causal", 4, 4096, 10, 10, 192, 192, true},
    {"D 192, Dv 128, causal", 4, 4096, 16, 16, 192, 128, true},
    {"D 256 full", 4, 4096, 8, 8, 256, 256, false},
    {"D 256 causal", 4, 4096, 8, 8, 256, 256, true},
};

// Normal numbers; of a mask nine of ten are 1.
const std::vector<char>& pool(int32_t dtype) {
  static std::vector<char> pools[16];
  std::vector<char>& bytes = pools[dtype];
  if (!bytes.empty()) return bytes;
  constexpr size_t kElements = (1 << 22) + 4099 * 16;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  bytes.resize(kElements * tessera_dtype_bytes(dtype));
  for (size_t n = 0; n < kElements; ++n) {
    const float x = normal(random);
    if (dtype == TESSERA_FLOAT32) std::memcpy(&bytes[n * 4], &x, 4);
    if (dtype == TESSERA_BFLOAT16) std::memcpy(&bytes[n * 2], reinterpret_cast<const char*>(&x) + 2, 2);
    if (dtype == TESSERA_BOOL) bytes[n] = x > -1.28f;
  }
  return bytes;
}

constexpr tessera_kernel kKernels[] = {TESSERA_KERNEL_BWD_SM90, TESSERA_KERNEL_BWD_SM80};

// The forward pass as a plan takes it, and the backward pass by either kernel, with one set of tensors.
class Call {
 public:
  explicit Call(const Case& c) {
    tessera_problem_init(&p_);
    constexpr int32_t kDtype = TESSERA_BFLOAT16;
    p_.q = layout(kDtype, {c.batch, c.rows, c.heads, c.head_dim});
    p_.k = layout(kDtype, {c.batch, c.rows, c.heads_kv, c.head_dim});
    p_.v = layout(kDtype, {c.batch, c.rows, c.heads_kv, c.head_dim_v});
    p_.o = layout(kDtype, {c.batch, c.rows, c.heads, c.head_dim_v});
    p_.lse = layout(TESSERA_FLOAT32, {c.batch, c.heads, c.rows});
    p_.causal = c.causal, p_.softcap = c.softcap, p_.dropout_p = c.dropout, p_.window_left = c.window;
    if (c.alibi) p_.alibi_slopes = layout(TESSERA_FLOAT32, {c.heads});
    if (c.mask) p_.mask = layout(TESSERA_BOOL, {1, 1, c.rows, c.rows});
    if (c.bias >= 0) p_.bias = layout(c.bias, {c.bias_batches, c.heads, c.rows, c.rows});
    tessera_device device;
    check(tessera_device_cuda(0, &device));
    check(tessera_make_plan(&p_, &device, &forward_));
    p_.direction = TESSERA_BACKWARD;
    p_.d_o = p_.o, p_.d_q = p_.q, p_.d_k = p_.k, p_.d_v = p_.v;
    if (c.d_bias) p_.d_bias = layout(TESSERA_FLOAT32, {c.bias_batches, c.heads, c.rows, c.rows});
    for (int n = 0; n < 2; ++n) {
      device.kernel = kKernels[n];
      check(tessera_make_plan(&p_, &device, &backward_[n]));
    }
  }
  ~Call() {
    for (const Address address : allocated_) driver("cuMemFree_v2", address);
  }

  void compile() {
    check(tessera_prepare(&forward_));
    for (const tessera_plan& plan : backward_) check(tessera_prepare(&plan));
  }

  void fill(void* stream) {
    size_t offset = 0;
    for (const tessera::core::TensorField& field : tessera::core::kTensorFields) {
      const tessera_layout& tensor = p_.*field.layout;
      if (tensor.rank == 0) continue;
      const size_t bytes = bytes_of(tensor), element = tessera_dtype_bytes(tensor.dtype);
      const Address address = allocate(bytes);
      field.set_pointer(buffers_, reinterpret_cast<void*>(address));
      if (field.written != tessera::core::Written::kNever) continue;
      const std::vector<char>& from = pool(tensor.dtype);
      const size_t shift = (offset += 4099 * 2) % (4099 * 16) * element, chunk = from.size() - 4099 * 16 * element;
      for (size_t at = 0; at < bytes; at += chunk) {
        driver("cuMemcpyHtoD_v2", address + at, static_cast<const void*>(from.data() + shift),
               std::min(chunk, bytes - at));
      }
    }
    for (const tessera_plan* plan : {&forward_, &backward_[0], &backward_[1]}) {
      bytes_ = std::max(bytes_, tessera_workspace_bytes(plan));
    }
    workspace_ = reinterpret_cast<void*>(allocate(std::max<size_t>(bytes_, 1)));
    executor_.stream = stream;
    check(tessera_forward(&forward_, &buffers_, workspace_, bytes_, &executor_));
    driver("cuStreamSynchronize", stream);
  }
  void launch(int kernel) { check(tessera_backward(&backward_[kernel], &buffers_, workspace_, bytes_, &executor_)); }

 private:
  Address allocate(size_t bytes) {
    Address address = 0;
    driver("cuMemAlloc_v2", &address, bytes);
    allocated_.push_back(address);
    return address;
  }
  tessera_problem p_;
  tessera_plan forward_, backward_[2];
  tessera_buffers buffers_{};
  tessera_executor executor_{};
  void* workspace_ = nullptr;
  size_t bytes_ = 0;
  std::vector<Address> allocated_;
};

double milliseconds_of(Call& call, int kernel, void* stream, double span) {
  const auto run = [&](int launches) {
    const auto start = Clock::now();
    for (int n = 0; n < launches; ++n) call.launch(kernel);
    driver("cuStreamSynchronize", stream);
    return milliseconds_since(start);
  };
  run(1);
  const int launches = std::max(2, static_cast<int>(span / run(1)));
  run(launches);
  return run(launches) / launches;
}

double visible(const Case& c) {
  const double n = static_cast<double>(c.rows);
  if (c.window >= 0) return n * (c.window + 1) - 0.5 * c.window * (c.window + 1);
  return c.causal ? n * n / 2 : n * n;
}

}  // namespace

int main(int argc, char** argv) try {
  make_context();
  if (argc > 2) {
    Call(kCases[std::stoul(argv[2]) % std::size(kCases)]).compile();
    return 0;
  }
  void* const stream = make_stream();
  std::printf("%-30s %9s %9s %6s\n", "TFLOP/s", "bwd_sm90", "bwd_sm80", "");
  for (const Case& c : kCases) {
    try {
      Call call(c);
      call.fill(stream);
      double rate[2];
      for (int n = 0; n < 2; ++n) {
        const double flops = 5.0 * c.batch * c.heads * visible(c) * (c.head_dim + c.head_dim_v);
        rate[n] = flops / milliseconds_of(call, n, stream, 100) / 1e9;
      }
      std::printf("%-30s %9.0f %9.0f %6.2f\n", c.name, rate[0], rate[1], rate[0] / rate[1]);
    } catch (const std::exception& error) {
      std::printf("%s: %.200s\n", c.name, error.what());
    }
    std::fflush(stdout);
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
