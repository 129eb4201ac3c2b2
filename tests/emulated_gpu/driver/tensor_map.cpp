// Tensor maps; each argument is checked against the requirements of the driver's documentation, as in the driver.
// https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html
#include "../tensor_map.hpp"

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "result.hpp"

using namespace tessera::emulated;

namespace {

// CUtensorMapDataType: uint8, uint16, uint32, int32, uint64, int64, float16, float32, float64, bfloat16, float32
// flushed, tfloat32, tfloat32 flushed.
constexpr uint16_t kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
constexpr int kTypes = sizeof kElementBytes / sizeof *kElementBytes;
// CUtensorMapSwizzle: none, 32, 64, 128 bytes.
constexpr uint64_t kSwizzledRowBytes[] = {UINT64_MAX, 32, 64, 128};

constexpr uint64_t kAlignment = 16, kMostExtent = uint64_t{1} << 32, kStrideLimit = uint64_t{1} << 40;
constexpr uint32_t kMostBox = 256, kMostStep = 8;

const char* refusal(const void* map, int type, uint32_t rank, const void* data, const uint64_t* extents,
                    const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave, int swizzle) {
  if (reinterpret_cast<uintptr_t>(map) % alignof(EmulatedTensorMap) != 0) return "the map's alignment";
  if (type < 0 || type >= kTypes) return "the type";
  if (rank < 1 || rank > EmulatedTensorMap::kMaxRank) return "the rank";
  if (interleave != 0) return "interleaved layouts, which are not emulated";
  if (swizzle < 0 || swizzle > 3) return "the swizzle";
  if (reinterpret_cast<uintptr_t>(data) % kAlignment != 0) return "the tensor's alignment";
  for (uint32_t i = 0; i < rank; ++i) {
    if (extents[i] == 0 || extents[i] > kMostExtent) return "an extent";
    if (box[i] == 0 || box[i] > kMostBox) return "the box";
    if (steps[i] == 0 || steps[i] > kMostStep) return "a step";
    if (steps[i] != 1) return "steps, which are not emulated";
  }
  for (uint32_t i = 0; i + 1 < rank; ++i) {
    if (strides[i] % kAlignment != 0 || strides[i] >= kStrideLimit) return "a stride";
  }
  const uint64_t box_row_bytes = uint64_t{box[0]} * kElementBytes[type];
  if (box_row_bytes % kAlignment != 0 || box_row_bytes > kSwizzledRowBytes[swizzle]) return "the box's rows";
  return nullptr;
}

}  // namespace

EMULATED_DRIVER cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* data, const uint64_t* extents,
                                       const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                                       int interleave, int swizzle, int, int) {
  if (const char* const why = refusal(map, type, rank, data, extents, strides, box, steps, interleave, swizzle)) {
    std::fprintf(stderr, "emulated GPU: cuTensorMapEncodeTiled: refuses %s\n", why);
    return kInvalidValue;
  }
  EmulatedTensorMap made{};
  made.magic = EmulatedTensorMap::kMagic;
  made.type = type, made.swizzle = swizzle, made.rank = rank;
  made.address = reinterpret_cast<uintptr_t>(data);
  made.element_bytes = kElementBytes[type];
  for (uint32_t i = 0; i < EmulatedTensorMap::kMaxRank; ++i) {
    made.extents[i] = i < rank ? static_cast<uint32_t>(extents[i]) : 1;
    made.box[i] = i < rank ? static_cast<uint16_t>(box[i]) : 1;
    if (i + 1 < rank) made.strides[i] = strides[i];
  }
  std::memcpy(map, &made, sizeof made);
  return kSuccess;
}
