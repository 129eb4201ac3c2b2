// Arrays of any framework as the library's layouts, by DLPack or the buffer protocol, without copies.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/tessera.h"

namespace tessera::python {

enum class Access { kRead, kWrite };

// The device of an array's memory, with DLPack's numbers, and the stream for work on it.
enum DeviceType : int32_t {
  kMeta = 0,
  kCpu = 1,
  kCuda = 2,
  kCudaHost = 3,
  kRocm = 10,
  kRocmHost = 11,
  kCudaManaged = 13
};
constexpr int32_t kNoGpu = -1;  // a device_id of kCuda: a GPU that this machine lacks
struct Place {
  int32_t device_type = kCpu, device_id = 0;
  void* stream = nullptr;  // CUDA: the producer's current stream; null: the default stream
};
std::string name_of(const Place& place);  // "cpu", "cuda:0"

// An array without data, such as a tracer's: a call with one is checked, and computes nothing.
struct ArrayWithoutData {
  std::string dtype;  // "float32"
  std::vector<int64_t> shape, strides;
  Place place;  // kMeta: of no device
};

struct Array {
  tessera_layout layout{};
  void* data = nullptr;
  Place place;
  bool has_data = true;
  nanobind::ndarray<nanobind::ro> owner;  // keeps exported data alive; empty if `source` itself does
};

// The common place of all arrays of a call: that of the first one.
class CommonPlace {
 public:
  // Throws Error if another array is elsewhere.
  void join(const char* name, const Place& place);
  const Place& place() const { return place_; }
  const char* first() const { return first_; }  // the name of the first; null if there is none

 private:
  const char* first_ = nullptr;
  Place place_;
};

// The memory of `source`, which must outlive the result. Throws Error, naming the argument and the `accepted` dtypes.
Array import_array(const char* name, nanobind::handle source, Access access, const char* accepted_dtypes);

}  // namespace tessera::python
