// The kernel families of the CUDA back end. To add a kernel, add a folder of device code, a file in families/ with its
// descriptor, and a row in registry.cpp.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "core/candidate.hpp"
#include "core/fields.hpp"
#include "core/steps.hpp"
#include "cuda/runtime/codegen.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

class LaunchList;

// The features that a family supports, as data. Its refusal is the difference from what a plan requests, and the
// support matrix is printed from it.
struct Supports {
  int32_t direction;                 // tessera_direction
  int32_t oldest_arch, newest_arch;  // compute capabilities, 10 * major + minor
  uint32_t dtypes;                   // dtypes of q, as 1 << tessera_dtype
  int64_t head_dim;                  // the largest, for keys and values
  uint64_t tensors;                  // tensors that may be given, as 1 << row of core::kTensorFields
  uint32_t cache_dtypes = 0;         // of k and v where they differ from q's: an 8-bit cache, as 1 << tessera_dtype
  bool partials = false;             // float32 results beside 16-bit inputs, and accumulate
  bool programs = false;             // score programs
};
inline constexpr int32_t kAnyNewer = INT32_MAX;
static_assert(core::kNumTensors <= 64);

constexpr uint32_t bits(std::initializer_list<int> numbers) {
  uint32_t all = 0;
  for (const int number : numbers) all |= uint32_t{1} << number;
  return all;
}
inline constexpr uint32_t kHalfPrecision = bits({TESSERA_FLOAT16, TESSERA_BFLOAT16});
consteval uint64_t tensors(std::initializer_list<core::TensorName> names) {
  uint64_t all = 0;
  for (const core::TensorName& name : names) all |= uint64_t{1} << name.index;
  return all;
}
inline constexpr uint64_t kAllTensors = ~uint64_t{0};
// Inputs of inference engines; no backward family supports them.
inline constexpr uint64_t kServingTensors =
    tensors({"page_table", "page_indptr", "page_indices", "causal_seqs", "tree_mask"});

// A place for each sequence: not supported by the kernels for decoding, for 8-bit inputs and for comparison.
inline constexpr uint64_t kPlaceTensors = tensors({"places"});

// The first requested feature that the family does not support, as text; "" if all are supported.
std::string refusal(const Supports& supports, const tessera_plan& plan);

// A refusal if a thread block needs more shared memory, in bytes, than the GPU allows; "" otherwise.
std::string refuse_shared_memory(int64_t bytes, const tessera_plan& plan);

// Classes of problems. The compiled configs of a class do not depend on lengths within it and, except in kPrefill, do
// not depend on positional masks or on whether rows are dense or packed.
enum class Use {
  kPrefill,  // full and causal, for all lengths that Hopper's tiles distinguish, with key lengths, a window, packed
  kPagedPrefill,
  kDecode,       // one query a sequence, and so few sequences that keys are split
  kDecodeBatch,  // one query a sequence, and so many sequences that keys are not split
  kPagedDecode,  // as kDecode and kDecodeBatch, with pages
  kPagedDecodeBatch,
  kTraining,  // the backward pass
};

// A problem whose kernels are prebuilt, and the limits of the family's own kernel.
struct PrebuiltRow {
  Use use;
  int64_t head_dim;
  Limits limits;
};

// The data that a family needs at multiples of 16 bytes, and the step that serves other data.
struct Alignment {
  bool (*fits)(const tessera_plan& plan, const tessera_buffers& buffers);  // NULL pointers fit
  void (*add_stand_in)(tessera_plan& plan);  // adds none for a plan that no family serves at other addresses
};

// A kernel family's descriptor. core::Candidate has its further refusals and what it fills in.
struct Family : core::Candidate {
  Supports supports;
  // Appends a step's launches to the list. It decides nothing: it fills in pointers, and their alignment selects one of
  // the step's kernels. Without buffers, pointers count as aligned. NULL: its plans' steps are other families'.
  tessera_status (*lower)(const tessera_plan& plan, const tessera_plan_step& step, const tessera_buffers& buffers,
                          void* workspace, LaunchList& launches);
  std::span<const PrebuiltRow> prebuilt;
  std::string (*tiles_json)() = nullptr;  // its table of tiles, for tessera_tiles
  const Alignment* alignment = nullptr;   // NULL: it serves data at any address
  // Appends the launches of a whole call. NULL: they are those of its steps, one after another.
  tessera_status (*lower_call)(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace,
                               LaunchList& launches) = nullptr;
};

// Appends a step's launches, with its place of the call's workspace.
tessera_status lower_step(const tessera_plan& plan, const tessera_plan_step& step, const tessera_buffers& buffers,
                          void* workspace, LaunchList& launches);
// Appends the step for data at other addresses than the plan's steps need, if there are such addresses.
void add_stand_in(tessera_plan& plan);

// All families. Of those with equal estimates, the first is chosen.
std::span<const Family* const> families();

// The family in `among` that does not refuse and has the least estimate. NULL: all refuse.
const Family* cheapest(std::span<const Family* const> among, const tessera_plan& plan);

// The family of that name. NULL: there is none.
const Family* find_family(std::string_view name);

extern const Family kFwdSm90, kFwdSm90Fp8, kFwdSm80, kBwdSm80, kBwdSm90, kDecodeSm90, kMixedSm90, kSharedPrefix;
// Only for comparison.
extern const Family kFwdFa1, kBwdFa1, kFwdStandard, kBwdStandard;

}  // namespace tessera::cuda
