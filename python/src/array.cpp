#include "array.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "error.hpp"

namespace nb = nanobind;

namespace tessera::python {
namespace {

using nb::dlpack::dltensor;
using nb::dlpack::dtype_code;

// ---- DLPack's C exchange interface: a view of a tensor without the cost of calling its __dlpack__ -------------------

struct ExchangeApi {
  struct {
    struct {
      uint32_t major, minor;
    } version;
    const ExchangeApi* previous;
  } header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* object, dltensor* out);  // may be null
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out);
};
constexpr uint32_t kExchangeMajor = 1;

const ExchangeApi* look_up_exchange_api(nb::handle type) {
  PyObject* found = PyObject_GetAttrString(type.ptr(), "__dlpack_c_exchange_api__");
  if (!found) {
    PyErr_Clear();
    return nullptr;
  }
  const nb::object capsule = nb::steal(found);
  if (!PyCapsule_IsValid(found, "dlpack_exchange_api")) return nullptr;
  auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(found, "dlpack_exchange_api"));
  while (api && api->header.version.major > kExchangeMajor) api = api->header.previous;
  return api && api->dltensor_from_py_object_no_sync ? api : nullptr;
}

// Few types have one, and these live as long as the process, which the reference ensures.
const ExchangeApi* exchange_api(nb::handle type) {
  struct Known {
    PyObject* type;
    const ExchangeApi* api;
  };
  static std::vector<Known>& known = *new std::vector<Known>;
  constexpr size_t kMostKnown = 32;
  for (const Known& entry : known) {
    if (entry.type == type.ptr()) return entry.api;
  }
  const ExchangeApi* api = look_up_exchange_api(type);
  if (api && known.size() < kMostKnown) known.push_back({Py_NewRef(type.ptr()), api});
  return api;
}

// ---- refusals -------------------------------------------------------------------------------------------------------

std::string type_of(nb::handle source) { return nb::cast<std::string>(nb::type_name(source.type())); }

std::string dtype_of(nb::handle source) {
  const nb::object dtype = source.attr("dtype");
  return nb::cast<std::string>(nb::str(nb::handle(dtype)));
}

std::string dtype_text(const nb::dlpack::dtype& dtype) {
  const std::string bits = std::to_string(dtype.bits);
  switch (static_cast<dtype_code>(dtype.code)) {
    case dtype_code::Int:
      return "int" + bits;
    case dtype_code::UInt:
      return "uint" + bits;
    case dtype_code::Float:
      return "float" + bits;
    case dtype_code::Complex:
      return "complex" + bits;
    case dtype_code::Bfloat:
      return "bfloat" + bits;
    case dtype_code::Bool:
      return "bool";
    default:
      break;
  }
  // From DLPack 1.1 on: number formats of at most 8 bits, each a kind of its own.
  constexpr int kFirstNarrow = 7;
  constexpr const char* kNarrow[] = {"float8_e3m4",     "float8_e4m3",   "float8_e4m3b11fnuz", "float8_e4m3fn",
                                     "float8_e4m3fnuz", "float8_e5m2",   "float8_e5m2fnuz",    "float8_e8m0fnu",
                                     "float6_e2m3fn",   "float6_e3m2fn", "float4_e2m1fn"};
  const int narrow = dtype.code - kFirstNarrow;
  if (narrow >= 0 && narrow < static_cast<int>(std::size(kNarrow))) return kNarrow[narrow];
  return "unknown (" + bits + " bits)";
}

// Number formats of DLPack 1.1.
constexpr dtype_code kE4M3{10}, kE5M2{12};

// lanes 0: view() does not know the name.
nb::dlpack::dtype dlpack_dtype(const std::string& name) {
  constexpr struct {
    const char* name;
    dtype_code code;
    uint8_t bits;
  } kNames[] = {
      {"float32", dtype_code::Float, 32},   {"float16", dtype_code::Float, 16}, {"float64", dtype_code::Float, 64},
      {"bfloat16", dtype_code::Bfloat, 16}, {"int32", dtype_code::Int, 32},     {"int64", dtype_code::Int, 64},
      {"int8", dtype_code::Int, 8},         {"int16", dtype_code::Int, 16},     {"uint8", dtype_code::UInt, 8},
      {"bool", dtype_code::Bool, 8},        {"float8_e4m3fn", kE4M3, 8},        {"float8_e5m2", kE5M2, 8}};
  for (const auto& known : kNames) {
    if (name == known.name) return {static_cast<uint8_t>(known.code), known.bits, 1};
  }
  return {0, 0, 0};
}

constexpr int32_t kUnknown = -1;
int32_t to_dtype(const nb::dlpack::dtype& dtype) {
  if (dtype.lanes != 1) return kUnknown;
  switch (static_cast<dtype_code>(dtype.code)) {
    case dtype_code::Float:
      return dtype.bits == 32   ? TESSERA_FLOAT32
             : dtype.bits == 16 ? TESSERA_FLOAT16
             : dtype.bits == 64 ? TESSERA_FLOAT64
                                : kUnknown;
    case dtype_code::Bfloat:
      return dtype.bits == 16 ? TESSERA_BFLOAT16 : kUnknown;
    case dtype_code::Int:
      return dtype.bits == 32   ? TESSERA_INT32
             : dtype.bits == 64 ? TESSERA_INT64
             : dtype.bits == 16 ? TESSERA_INT16
             : dtype.bits == 8  ? TESSERA_INT8
                                : kUnknown;
    case dtype_code::UInt:
      return dtype.bits == 8 ? TESSERA_UINT8 : kUnknown;
    case dtype_code::Bool:
      return dtype.bits == 8 ? TESSERA_BOOL : kUnknown;
    case kE4M3:
      return dtype.bits == 8 ? TESSERA_FLOAT8_E4M3 : kUnknown;
    case kE5M2:
      return dtype.bits == 8 ? TESSERA_FLOAT8_E5M2 : kUnknown;
    default:
      return kUnknown;
  }
}

// Pinned host memory counts as the CPU's, and managed memory as the GPU's.
Place place_of(const dltensor& tensor) {
  const auto [type, id] = tensor.device;
  if (type == kCpu || type == kCudaHost || type == kRocmHost) return {};
  return {type == kCudaManaged ? static_cast<int32_t>(kCuda) : type, id};
}

Array view(const char* name, const dltensor& tensor, const char* accepted_dtypes) {
  if (tensor.ndim < 1 || tensor.ndim > TESSERA_MAX_RANK) {
    throw Error(std::string(name) + ": rank " + std::to_string(tensor.ndim) + ", accepted 1 .. " +
                std::to_string(TESSERA_MAX_RANK));
  }
  Array array;
  array.place = place_of(tensor);
  array.layout.dtype = to_dtype(tensor.dtype);
  // Integers of other sizes than 32 bits are accepted only for arguments that name them.
  const int32_t dtype = array.layout.dtype;
  const bool sized =
      dtype == TESSERA_INT64 || dtype == TESSERA_INT16 || dtype == TESSERA_INT8 || dtype == TESSERA_UINT8;
  if (dtype == kUnknown || (sized && !std::strstr(accepted_dtypes, tessera_dtype_name(dtype)))) {
    throw Error(std::string(name) + ": dtype " + dtype_text(tensor.dtype) + ", accepted " + accepted_dtypes);
  }
  array.layout.rank = tensor.ndim;
  const bool empty = std::find(tensor.shape, tensor.shape + tensor.ndim, 0) != tensor.shape + tensor.ndim;
  int64_t contiguous = 1;
  for (int axis = tensor.ndim - 1; axis >= 0; --axis) {
    // If no step is ever made along an axis, producers set any stride.
    const bool any_stride = !tensor.strides || empty || tensor.shape[axis] == 1;
    array.layout.shape[axis] = tensor.shape[axis];
    array.layout.strides[axis] = any_stride ? contiguous : tensor.strides[axis];
    contiguous *= tensor.shape[axis];
  }
  array.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  return array;
}

Array layout_of(const char* name, const ArrayWithoutData& source, const char* accepted_dtypes) {
  const int32_t rank = static_cast<int32_t>(source.shape.size());
  dltensor tensor{};
  tensor.ndim = rank;
  tensor.shape = const_cast<int64_t*>(source.shape.data());
  tensor.strides = const_cast<int64_t*>(source.strides.data());
  tensor.dtype = dlpack_dtype(source.dtype);
  if (tensor.dtype.lanes == 0)
    throw Error(std::string(name) + ": dtype " + source.dtype + ", accepted " + accepted_dtypes);
  Array array = view(name, tensor, accepted_dtypes);
  array.place = source.place;
  array.data = nullptr;
  array.has_data = false;
  return array;
}

// ---- import ---------------------------------------------------------------------------------------------------------

// Why a framework does not export an array, without the stack frames that some append.
std::string first_line(const nb::python_error& error) {
  const std::string text = nb::cast<std::string>(nb::str(error.value()));
  return text.substr(0, text.find('\n'));
}

Array import_exchanged(const char* name, nb::handle source, const ExchangeApi& api, const char* accepted_dtypes) {
  dltensor tensor{};
  if (api.dltensor_from_py_object_no_sync(source.ptr(), &tensor) != 0) {
    const nb::python_error error;
    const std::string device = nb::cast<std::string>(nb::str(nb::getattr(source, "device", nb::str("unknown"))));
    throw Error(std::string(name) + ": on device " + device +
                ", accepted the CPU or a GPU, one for all arrays: " + first_line(error));
  }
  Array array = view(name, tensor, accepted_dtypes);
  // The CPU has no streams. A GPU's work uses the framework's own current stream, so that neither waits for the other.
  Place& place = array.place;
  if (place.device_type == kCuda && api.current_work_stream &&
      api.current_work_stream(place.device_type, place.device_id, &place.stream) != 0) {
    const nb::python_error error;
    throw Error(std::string(name) + ": " + first_line(error));
  }
  return array;
}

// nanobind's arrays have their fields behind accessors.
dltensor fields(const nb::ndarray<nb::ro>& array) {
  dltensor tensor{};
  tensor.data = const_cast<void*>(array.data());
  tensor.device.device_type = array.device_type();
  tensor.device.device_id = array.device_id();
  tensor.ndim = static_cast<int32_t>(array.ndim());
  tensor.dtype = array.dtype();
  tensor.shape = const_cast<int64_t*>(array.shape_ptr());
  tensor.strides = const_cast<int64_t*>(array.stride_ptr());
  return tensor;
}

// Calls __dlpack__ without a stream: a GPU's producer then orders its work before that of the default stream.
bool export_from(nb::handle source, Access access, nb::ndarray<nb::ro>& owner) {
  if (access == Access::kRead) return nb::try_cast(source, owner, false);
  nb::ndarray<> writable;
  if (!nb::try_cast(source, writable, false)) return false;
  owner = nb::ndarray<nb::ro>(writable);
  return true;
}

// NumPy has these dtypes by ml_dtypes, and exports them by no protocol, only as their bits.
struct Registered {
  const char *name, *bits;
  dtype_code code;
};
const Registered* registered_dtype(nb::handle source) {
  static constexpr Registered kRegistered[] = {
      {"bfloat16", "uint16", dtype_code::Bfloat}, {"float8_e4m3fn", "uint8", kE4M3}, {"float8_e5m2", "uint8", kE5M2}};
  if (!nb::hasattr(source, "__array_interface__") || !nb::hasattr(source, "dtype")) return nullptr;
  const std::string name = dtype_of(source);
  const auto* const found = std::ranges::find(kRegistered, name, &Registered::name);
  return found == std::end(kRegistered) ? nullptr : found;
}

[[noreturn]] void refuse(const char* name, nb::handle source, Access access, const char* accepted_dtypes) {
  nb::ndarray<nb::ro> readable;
  if (access == Access::kWrite && nb::try_cast(source, readable, false)) {
    throw Error(std::string(name) + ": read-only, accepted a writable array");
  }
  std::string given = type_of(source);
  if (nb::hasattr(source, "dtype")) given += " of dtype " + dtype_of(source);
  throw Error(std::string(name) + ": " + given +
              " is offered neither by DLPack nor as a buffer, accepted an array on the CPU, dtype " + accepted_dtypes);
}

}  // namespace

std::string name_of(const Place& place) {
  const std::string id = ":" + std::to_string(place.device_id);
  switch (place.device_type) {
    case kMeta:
      return "meta";
    case kCpu:
      return "cpu";
    case kCuda:
      return place.device_id == kNoGpu ? "cuda" : "cuda" + id;
    case kRocm:
      return "rocm" + id;
    default:
      break;
  }
  constexpr struct {
    int32_t type;
    const char* name;
  } kOthers[] = {{4, "opencl"},  {7, "vulkan"},  {8, "metal"},    {9, "vpi"},   {12, "an extension's"},
                 {14, "oneapi"}, {15, "webgpu"}, {16, "hexagon"}, {17, "maia"}, {18, "trainium"}};
  for (const auto& other : kOthers) {
    if (other.type == place.device_type) return other.name + id;
  }
  return "unknown" + id;
}

void CommonPlace::join(const char* name, const Place& place) {
  if (!first_) {
    first_ = name;
    place_ = place;
  } else if (place.device_type != place_.device_type || place.device_id != place_.device_id) {
    throw Error(std::string(name) + ": on device " + name_of(place) + ", " + first_ + " is on " + name_of(place_) +
                ": accepted: one device for all");
  }
}

Array import_array(const char* name, nb::handle source, Access access, const char* accepted_dtypes) {
  // An array that is also a buffer (NumPy's) is fast to export, and reports whether it may be written.
  if (!PyObject_CheckBuffer(source.ptr())) {
    if (nb::isinstance<ArrayWithoutData>(source)) {
      return layout_of(name, nb::cast<const ArrayWithoutData&>(source), accepted_dtypes);
    }
    if (const ExchangeApi* api = exchange_api(source.type())) {
      return import_exchanged(name, source, *api, accepted_dtypes);
    }
  }
  nb::ndarray<nb::ro> owner;
  if (export_from(source, access, owner)) {
    Array array = view(name, fields(owner), accepted_dtypes);
    array.owner = std::move(owner);
    return array;
  }
  if (const Registered* const registered = registered_dtype(source)) {
    const nb::object bits = source.attr("view")(registered->bits);
    if (export_from(bits, access, owner)) {
      dltensor tensor = fields(owner);
      tensor.dtype.code = static_cast<uint8_t>(registered->code);
      Array array = view(name, tensor, accepted_dtypes);
      array.owner = std::move(owner);
      return array;
    }
    refuse(name, bits, access, accepted_dtypes);
  }
  refuse(name, source, access, accepted_dtypes);
}

}  // namespace tessera::python
