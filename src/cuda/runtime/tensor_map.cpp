#include "cuda/runtime/tensor_map.hpp"

#include <cinttypes>
#include <cstdio>
#include <utility>

#include "core/geometry.hpp"
#include "core/status.hpp"
#include "cuda/params.hpp"

namespace tessera::cuda {
namespace {

constexpr int kRank = 4;
constexpr int64_t kElementBytes = 2;
constexpr int64_t kStrideLimit = int64_t{1} << 40;  // bytes

// The outer dimensions: row, head, batch.
struct Outer {
  int64_t extent[kRank - 1], stride_bytes[kRank - 1];
};

// Everything that determines a map.
struct Described {
  int32_t arch;
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;
  const void* data;
  uint64_t extents[kRank], strides[kRank - 1];
  uint32_t box[kRank];

  bool operator==(const Described&) const = default;
};

// A map that this thread made. The same tensors recur when a call is repeated, or when an allocator reuses memory.
struct Kept {
  Described described;
  TensorMap map;
};

Kept& kept_for(const Described& described) {
  constexpr size_t kPlaces = 64;
  thread_local Kept kept[kPlaces]{};
  constexpr uint64_t kPrime = 0x9E3779B97F4A7C15;  // 2^64 / golden ratio
  const uint64_t hash = (reinterpret_cast<uintptr_t>(described.data) ^ described.box[1]) * kPrime;
  return kept[hash >> 58];
}

int64_t columns_of(const tessera_layout& layout) { return layout.shape[layout.rank - 1]; }

Outer outer_of(const tessera_layout& layout) {
  const core::RowStrides s = core::row_strides(layout);
  const bool packed = layout.rank == 3;
  Outer outer{{layout.shape[packed ? 0 : 1], layout.shape[packed ? 1 : 2], packed ? 1 : layout.shape[0]},
              {s.row * kElementBytes, s.head * kElementBytes, s.batch * kElementBytes}};
  // No copy steps along a dimension of extent 1, so its stride can be anything; a valid one is stored.
  for (int n = 0; n < kRank - 1; ++n) {
    if (outer.extent[n] == 1) {
      outer.stride_bytes[n] = padded_to(columns_of(layout) * kElementBytes, kTensorMapAlignment);
    }
  }
  return outer;
}

}  // namespace

std::string refuse_no_rows(const char* name, int64_t rows) {
  return rows == 0 ? std::string(name) + ": no rows, and a tensor map needs some" : "";
}

std::string refuse_tensor_map(const char* name, const tessera_layout& layout) {
  const int64_t row_bytes = columns_of(layout) * kElementBytes;
  char text[128];
  if (row_bytes % kTensorMapAlignment != 0) {
    std::snprintf(text, sizeof text, "%s: rows of %" PRId64 " bytes, TMA takes multiples of %" PRId64, name, row_bytes,
                  kTensorMapAlignment);
    return text;
  }
  const Outer outer = outer_of(layout);
  constexpr const char* kNames[] = {"row", "head", "batch"};
  for (int n = 0; n < kRank - 1; ++n) {
    const int64_t stride = outer.stride_bytes[n];
    if (stride % kTensorMapAlignment == 0 && stride >= row_bytes && stride < kStrideLimit) continue;
    std::snprintf(text, sizeof text,
                  "%s: %s stride of %" PRId64 " bytes, TMA takes multiples of %" PRId64 " from a row's %" PRId64
                  " to below 2^40",
                  name, kNames[n], stride, kTensorMapAlignment, row_bytes);
    return text;
  }
  return "";
}

tessera_status make_tensor_map(const Driver& driver, const tessera_device& device, const char* name,
                               const tessera_layout& layout, const void* data, const Box& box, TensorMap& map) {
  Outer outer = outer_of(layout);
  const bool padded = box.layout == BoxLayout::kPadded;  // a box has at most 256 columns, so they are counted in pairs
  const int64_t bytes = padded ? 2 * kElementBytes : kElementBytes;
  Described d{device.arch,
              padded                             ? kTensorMapUInt32
              : layout.dtype == TESSERA_BFLOAT16 ? kTensorMapBFloat16
                                                 : kTensorMapFloat16,
              padded ? kTensorMapNotSwizzled : kTensorMapSwizzle128B,
              data,
              {static_cast<uint64_t>(columns_of(layout) * kElementBytes / bytes)},
              {},
              {static_cast<uint32_t>(box.row_bytes / bytes), static_cast<uint32_t>(box.rows), 1, 1}};
  if (box.heads > 1) {
    std::swap(outer.extent[0], outer.extent[1]), std::swap(outer.stride_bytes[0], outer.stride_bytes[1]);
    d.box[1] = static_cast<uint32_t>(box.heads), d.box[2] = static_cast<uint32_t>(box.rows);
  }
  for (int n = 0; n < kRank - 1; ++n) {
    d.extents[n + 1] = static_cast<uint64_t>(outer.extent[n]);
    d.strides[n] = static_cast<uint64_t>(outer.stride_bytes[n]);
  }
  Kept& kept = kept_for(d);
  if (kept.described == d) {
    map = kept.map;
    return ok();
  }
  constexpr uint32_t kSteps[kRank] = {1, 1, 1, 1};
  const CUresult result =
      driver.cuTensorMapEncodeTiled(&map, d.type, kRank, const_cast<void*>(data), d.extents, d.strides, d.box, kSteps,
                                    kTensorMapNotInterleaved, d.swizzle, kTensorMapL2Promotion128B, kTensorMapZeroFill);
  if (result != kCudaSuccess) return check(driver, result, (std::string(name) + ": cuTensorMapEncodeTiled").c_str());
  kept = {d, map};
  return ok();
}

}  // namespace tessera::cuda
