// The CUDA back end's kernel families. To add a kernel: a folder of device code, a file in families/ with its descriptor, and a
// row in registry.cpp.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "core/candidate.hpp"
#include "core/fields.hpp"
#include "cuda/runtime/codegen.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

class LaunchList;

// What a family takes, as data: what it refuses is the difference to what is asked, and the support matrix prints itself.
struct Supports {
  int32_t direction;                 // tessera_direction
  int32_t oldest_arch, newest_arch;  // compute capabilities, 10 * major + minor
  uint32_t dtypes;                   // of q: 1 << tessera_dtype
  int64_t head_dim;                  // at most, of keys and of values
  uint32_t tensors;                  // 1 << row of core::kTensorFields, of those that may be given
};
inline constexpr int32_t kAnyNewer = INT32_MAX;
static_assert(core::kNumTensors <= 32);

constexpr uint32_t bits(std::initializer_list<int> numbers) {
  uint32_t all = 0;
  for (const int number : numbers) all |= uint32_t{1} << number;
  return all;
}
inline constexpr uint32_t kHalfPrecision = bits({TESSERA_FLOAT16, TESSERA_BFLOAT16});
consteval uint32_t tensors(std::initializer_list<core::TensorName> names) {
  uint32_t all = 0;
  for (const core::TensorName& name : names) all |= uint32_t{1} << name.index;
  return all;
}
inline constexpr uint32_t kAllTensors = ~uint32_t{0};
// Inputs of inference engines; no backward family supports them.
inline constexpr uint32_t kServingTensors =
    tensors({"page_table", "page_indptr", "page_indices", "causal_seqs", "tree_mask"});

// The first that a plan asks for and a family has not, in words; "" where it has all.
std::string refusal(const Supports& supports, const tessera_plan& plan);

// That a thread block's shared memory, in bytes, is more than the GPU has for one; "" where it is not.
std::string refuse_shared_memory(int64_t bytes, const tessera_plan& plan);

// Problems that stand for many: what their launches are compiled for does not depend on lengths beyond these kinds, nor, but for
// kPrefill, on masks by position and on whether rows are dense or packed.
enum class Use {
  kPrefill,  // full and causal, of all lengths that Hopper's tiles tell apart, with key lengths, a window, packed
  kPagedPrefill,
  kDecode,       // one query a sequence, so few sequences that keys are split
  kDecodeBatch,  // so many that they are not
  kPagedDecode,  // likewise with pages
  kPagedDecodeBatch,
  kTraining,  // the backward pass
};

// A problem whose kernels are prebuilt, and the limits of the family's own.
struct PrebuiltRow {
  Use use;
  int64_t head_dim;
  Limits limits;
};

// A kernel family's descriptor. What it refuses beyond its `supports`, and what it fills in, are the candidate's.
struct Family : core::Candidate {
  Supports supports;
  // A plan's launches, onto the list. Decides nothing: pointers are filled in, and what they are aligned to takes the one or the
  // other kernel of the plan. Without buffers they are taken to be aligned.
  tessera_status (*lower)(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace,
                          LaunchList& launches);
  std::span<const PrebuiltRow> prebuilt;
  std::string (*tiles_json)() = nullptr;  // its table of tiles, for tessera_tiles
};

// Of those that take as long as another, the first is chosen.
std::span<const Family* const> families();

// Of `among` the one that does not refuse and takes the least time. NULL: all refuse.
const Family* cheapest(std::span<const Family* const> among, const tessera_plan& plan);

// The family of that name. NULL: there is none.
const Family* find_family(std::string_view name);

extern const Family kFwdSm90, kFwdSm80, kBwdSm80, kBwdSm90, kDecodeSm90, kMixedSm90, kSharedPrefix;
// For comparison only.
extern const Family kFwdFa1, kBwdFa1, kFwdStandard, kBwdStandard;

}  // namespace tessera::cuda
