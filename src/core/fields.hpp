// The fields of a problem: one row for every tensor and one for every option. Validation, pointers, costs,
// descriptions, the program's flags and Python's keywords are derived from these rows. A new option needs a row here, a
// member of tessera_problem (a tensor also one of tessera_buffers), its meaning in the oracle, and its code in each
// back end's score step.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <string_view>
#include <type_traits>

#include "core/geometry.hpp"
#include "tessera/tessera.h"

namespace tessera::core {

inline constexpr int64_t kMaxLength = INT32_MAX;  // positions and page numbers are 32 bits wide
// (576, 512) is multi-head latent attention, whose values are the first 512 columns of its keys.
inline constexpr int64_t kMaxHeadDim = 576, kMaxHeadDimV = 512;

// ---- shapes, in symbols ---------------------------------------------------------------------------------------------

// The first tensor that has a symbol binds it, in the order of the rows.
enum Symbol {
  kB,
  kSq,
  kSk,
  kTq,
  kTk,
  kHq,
  kHkv,
  kD,
  kDv,
  kPages,
  kPageSize,
  kMaxPages,
  kPageIndices,
  kTreeWords,
  kGroups,
  kBlocksQ,
  kBlocksK,
  kTwo,
  kScaleBlocksQ,
  kScaleBlocksK,
  kFour,
  kSymbols
};

struct SymbolRule {
  const char* name;
  int64_t min, max;
};
inline constexpr SymbolRule kSymbolRules[] = {
    {"B", 0, kMaxLength},
    {"Sq", 0, kMaxLength},
    {"Sk", 0, kMaxLength},
    {"Tq", 0, kMaxLength},
    {"Tk", 0, kMaxLength},
    {"Hq", 1, kMaxLength},
    {"Hkv", 1, kMaxLength},
    {"D", 1, kMaxHeadDim},
    {"Dv", 1, kMaxHeadDimV},
    {"pages", 0, kMaxLength},
    {"page_size", 1, kMaxLength},
    {"max_pages", 0, kMaxLength},
    {"N", 0, kMaxLength},
    {"W", 1, kMaxLength / 32},
    {"G", 0, kMaxLength},
    {"ceil(Sq / mask_block_q)", 0, kMaxLength},
    {"ceil(Sk / mask_block_k)", 0, kMaxLength},
    {"2", 2, 2},
    {"ceil(Sq / 128)", 0, kMaxLength},
    {"ceil(Sk / 128)", 0, kMaxLength},
    {"4", 4, 4},
};
static_assert(std::size(kSymbolRules) == kSymbols, "one row for each symbol");

enum AxisKind { kEqual, kEqualOrOne, kPlusOne };
struct Axis {
  Symbol symbol;
  AxisKind kind = kEqual;
};
struct Shape {
  int rank = 0;
  Axis axes[TESSERA_MAX_RANK] = {};
};

// "[B, Hq|1, Sq, Sk]"
struct ShapeSymbols {
  char text[160];
};
inline ShapeSymbols symbols_of(const Shape& shape) {
  ShapeSymbols symbols{};
  constexpr const char* kSuffix[] = {"", "|1", " + 1"};
  int length = 0;
  for (int axis = 0; axis < shape.rank; ++axis) {
    const auto [symbol, kind] = shape.axes[axis];
    length += std::snprintf(symbols.text + length, sizeof symbols.text - length, "%s%s%s", axis == 0 ? "[" : ", ",
                            kSymbolRules[symbol].name, kSuffix[kind]);
  }
  std::snprintf(symbols.text + length, sizeof symbols.text - length, "]");
  return symbols;
}

namespace shapes {
inline constexpr Shape kNone{};
inline constexpr Shape kDenseQ{4, {{kB}, {kSq}, {kHq}, {kD}}}, kPackedQ{3, {{kTq}, {kHq}, {kD}}};
inline constexpr Shape kDenseO{4, {{kB}, {kSq}, {kHq}, {kDv}}}, kPackedO{3, {{kTq}, {kHq}, {kDv}}};
inline constexpr Shape kDenseK{4, {{kB}, {kSk}, {kHkv}, {kD}}}, kPackedK{3, {{kTk}, {kHkv}, {kD}}};
inline constexpr Shape kDenseV{4, {{kB}, {kSk}, {kHkv}, {kDv}}}, kPackedV{3, {{kTk}, {kHkv}, {kDv}}};
inline constexpr Shape kPagedK{4, {{kPages}, {kPageSize}, {kHkv}, {kD}}};
inline constexpr Shape kPagedV{4, {{kPages}, {kPageSize}, {kHkv}, {kDv}}};
inline constexpr Shape kDenseLse{3, {{kB}, {kHq}, {kSq}}}, kPackedLse{2, {{kHq}, {kTq}}};
inline constexpr Shape kOffsets{1, {{kB, kPlusOne}}}, kPerSequence{1, {{kB}}}, kPageTable{2, {{kB}, {kMaxPages}}},
    kPageList{1, {{kPageIndices}}};
inline constexpr Shape kDenseTree{3, {{kB}, {kSq}, {kTreeWords}}}, kPackedTree{2, {{kTq}, {kTreeWords}}};
inline constexpr Shape kGroupOffsets{1, {{kGroups, kPlusOne}}}, kPerGroup{1, {{kGroups}}};
inline constexpr Shape kScores{4, {{kB, kEqualOrOne}, {kHq, kEqualOrOne}, {kSq, kEqualOrOne}, {kSk, kEqualOrOne}}};
inline constexpr Shape kBlocks{4, {{kB, kEqualOrOne}, {kHq, kEqualOrOne}, {kBlocksQ}, {kBlocksK}}};
inline constexpr Shape kPerHead{1, {{kHq}}}, kPerSequenceAndHead{2, {{kB}, {kHq}}};
inline constexpr Shape kPair{1, {{kTwo}}};
inline constexpr Shape kScales{1, {{kHkv, kEqualOrOne}}}, kScalesBatch{2, {{kB}, {kHkv}}};
inline constexpr Shape kScalesQ{3, {{kB}, {kScaleBlocksQ}, {kHkv}}}, kScalesK{3, {{kB}, {kScaleBlocksK}, {kHkv}}},
    kScalesPaged{3, {{kPages}, {kPageSize}, {kHkv}}};
inline constexpr Shape kPlaces{2, {{kB}, {kFour}}};
}  // namespace shapes

// ---- tensors --------------------------------------------------------------------------------------------------------

// What selects a row's shape: cu_seqlens_q; cu_seqlens_k and page_table; its own rank; or kLastAxes: the shape or its
// last axes, broadcast by NumPy's rules; kScales: shapes::kScales, kScalesBatch or, of rank 3, `dense` or `paged`.
enum class Form { kByRank, kQueries, kKeys, kLastAxes, kScales };
enum class Need { kAlways, kBackward, kIfGiven, kIfGivenBackward };
// kKeys: that of q or, under 16 bits, an 8-bit type. kOutput: that of q or float32, of 8 bits bfloat16, float16 or
// float32.
enum class Dtypes { kFloating, kAsQ, kAsQOrFloat32, kKeys, kOutput, kFloat32, kFloat32OrAsQ, kInt32, kInt64, kBool };
enum class LastAxis { kAnyStride, kContiguous };
enum class Written { kNever, kForward, kBackward };

struct TensorField {
  const char* name;
  size_t layout_at, pointer_at;  // of tessera_problem and tessera_buffers, in bytes
  tessera_layout tessera_problem::*layout;
  const void* (*pointer)(const tessera_buffers& buffers);
  void (*set_pointer)(tessera_buffers& buffers, const void* pointer);
  Need need;
  Dtypes dtypes;
  LastAxis last_axis;
  Written written;
  Form form;
  Shape dense, packed, paged;
  const char* flag;   // of the program: the file that it is read from or written to; nullptr: positional
  const char* words;  // its name among the options in a plan's text; nullptr: not mentioned
  const char* what;   // its meaning, for a help text to which dtype and shape are added
};

namespace detail {
template <auto member>
constexpr const void* pointer_of(const tessera_buffers& buffers) {
  return buffers.*member;
}
template <auto member>
void set_pointer_of(tessera_buffers& buffers, const void* pointer) {
  using Pointer = std::remove_reference_t<decltype(buffers.*member)>;
  buffers.*member = static_cast<Pointer>(const_cast<void*>(pointer));
}
}  // namespace detail

// clang-format off
#define TESSERA_TENSOR(name) #name, offsetof(tessera_problem, name), offsetof(tessera_buffers, name), &tessera_problem::name, detail::pointer_of<&tessera_buffers::name>, detail::set_pointer_of<&tessera_buffers::name>
inline constexpr TensorField kTensorFields[] = {
    {TESSERA_TENSOR(q),            Need::kAlways,          Dtypes::kFloating,     LastAxis::kContiguous, Written::kNever,    Form::kQueries,  shapes::kDenseQ,      shapes::kPackedQ,            shapes::kNone,   nullptr,          nullptr,       "Queries"},
    {TESSERA_TENSOR(cu_seqlens_q), Need::kIfGiven,         Dtypes::kInt32,        LastAxis::kAnyStride,  Written::kNever,    Form::kByRank,   shapes::kOffsets,     shapes::kNone,               shapes::kNone,   "--cu-seqlens-q", nullptr,       "Packed queries: where each sequence starts"},
    {TESSERA_TENSOR(k),            Need::kAlways,          Dtypes::kKeys,         LastAxis::kContiguous, Written::kNever,    Form::kKeys,     shapes::kDenseK,      shapes::kPackedK,            shapes::kPagedK, nullptr,          nullptr,       "Keys"},
    {TESSERA_TENSOR(v),            Need::kAlways,          Dtypes::kKeys,         LastAxis::kContiguous, Written::kNever,    Form::kKeys,     shapes::kDenseV,      shapes::kPackedV,            shapes::kPagedV, nullptr,          nullptr,       "Values"},
    {TESSERA_TENSOR(cu_seqlens_k), Need::kIfGiven,         Dtypes::kInt32,        LastAxis::kAnyStride,  Written::kNever,    Form::kByRank,   shapes::kOffsets,     shapes::kNone,               shapes::kNone,   "--cu-seqlens-k", nullptr,       "Packed keys: where each sequence starts"},
    {TESSERA_TENSOR(page_table),   Need::kIfGiven,         Dtypes::kInt32,        LastAxis::kAnyStride,  Written::kNever,    Form::kByRank,   shapes::kPageTable,   shapes::kNone,               shapes::kNone,   "--page-table",   nullptr,       "Pages of each sequence"},
    {TESSERA_TENSOR(page_indptr),  Need::kIfGiven,         Dtypes::kInt32,        LastAxis::kAnyStride,  Written::kNever,    Form::kByRank,   shapes::kOffsets,     shapes::kNone,               shapes::kNone,   "--page-indptr",  nullptr,       "CSR page table: where each sequence's pages start in --page-indices"},
    {TESSERA_TENSOR(page_indices), Need::kIfGiven,         Dtypes::kInt32,        LastAxis::kAnyStride,  Written::kNever,    Form::kByRank,   shapes::kPageList,    shapes::kNone,               shapes::kNone,   "--page-indices", nullptr,       "CSR page table: pages of one sequence after another's"},
    {TESSERA_TENSOR(seqused_k),    Need::kIfGiven,         Dtypes::kInt32,        LastAxis::kAnyStride,  Written::kNever,    Form::kByRank,   shapes::kPerSequence, shapes::kNone,               shapes::kNone,   "--seqused-k",    "key lengths", "Keys used of each sequence"},
    {TESSERA_TENSOR(causal_seqs),  Need::kIfGiven,         Dtypes::kBool,         LastAxis::kAnyStride,  Written::kNever,    Form::kByRank,   shapes::kPerSequence, shapes::kNone,               shapes::kNone,   "--causal-seqs",  "causal sequences", "Which sequences are causal"},
    {TESSERA_TENSOR(tree_mask),    Need::kIfGiven,         Dtypes::kInt32,        LastAxis::kAnyStride,  Written::kNever,    Form::kQueries,  shapes::kDenseTree,   shapes::kPackedTree,         shapes::kNone,   "--tree-mask",    "tree mask",   "Bits of the keys from Sk - Sq on that each query sees"},
    {TESSERA_TENSOR(prefix_groups), Need::kIfGiven,        Dtypes::kInt32,        LastAxis::kAnyStride,  Written::kNever,    Form::kByRank,   shapes::kGroupOffsets, shapes::kNone,              shapes::kNone,   "--prefix-groups", "shared prefixes", "Where each group of sequences that share a prefix starts in the batch"},
    {TESSERA_TENSOR(prefix_lens),  Need::kIfGiven,         Dtypes::kInt32,        LastAxis::kAnyStride,  Written::kNever,    Form::kByRank,   shapes::kPerGroup,    shapes::kNone,               shapes::kNone,   "--prefix-lens",  nullptr,       "Keys of each group's prefix"},
    {TESSERA_TENSOR(o),            Need::kAlways,          Dtypes::kOutput,       LastAxis::kContiguous, Written::kForward,  Form::kQueries,  shapes::kDenseO,      shapes::kPackedO,            shapes::kNone,   "--out",          nullptr,       "Output"},
    {TESSERA_TENSOR(lse),          Need::kBackward,        Dtypes::kFloat32,      LastAxis::kAnyStride,  Written::kForward,  Form::kQueries,  shapes::kDenseLse,    shapes::kPackedLse,          shapes::kNone,   "--lse",          nullptr,       "Log-sum-exp of the scores"},
    {TESSERA_TENSOR(bias),         Need::kIfGiven,         Dtypes::kFloat32OrAsQ, LastAxis::kAnyStride,  Written::kNever,    Form::kLastAxes, shapes::kScores,      shapes::kNone,               shapes::kNone,   "--bias",         "bias",        "Added to the scores"},
    {TESSERA_TENSOR(mask),         Need::kIfGiven,         Dtypes::kBool,         LastAxis::kAnyStride,  Written::kNever,    Form::kLastAxes, shapes::kScores,      shapes::kNone,               shapes::kNone,   "--mask",         "mask",        "Visible keys"},
    {TESSERA_TENSOR(block_mask),   Need::kIfGiven,         Dtypes::kBool,         LastAxis::kAnyStride,  Written::kNever,    Form::kByRank,   shapes::kBlocks,      shapes::kNone,               shapes::kNone,   "--block-mask",   "block mask",  "Visible blocks of --mask-block queries and keys"},
    {TESSERA_TENSOR(alibi_slopes), Need::kIfGiven,         Dtypes::kFloat32,      LastAxis::kAnyStride,  Written::kNever,    Form::kByRank,   shapes::kPerHead,     shapes::kPerSequenceAndHead, shapes::kNone,   "--alibi",        "ALiBi",       "ALiBi slopes"},
    {TESSERA_TENSOR(sink),         Need::kIfGiven,         Dtypes::kFloat32,      LastAxis::kAnyStride,  Written::kNever,    Form::kByRank,   shapes::kPerHead,     shapes::kNone,               shapes::kNone,   "--sink",         "sink",        "A logit a head that joins the denominator"},
    {TESSERA_TENSOR(d_o),          Need::kBackward,        Dtypes::kAsQ,          LastAxis::kContiguous, Written::kNever,    Form::kQueries,  shapes::kDenseO,      shapes::kPackedO,            shapes::kNone,   "--grad",         nullptr,       "Cotangent of the output: asks for gradients"},
    {TESSERA_TENSOR(d_q),          Need::kBackward,        Dtypes::kAsQOrFloat32, LastAxis::kContiguous, Written::kBackward, Form::kQueries,  shapes::kDenseQ,      shapes::kPackedQ,            shapes::kNone,   "--dq",           nullptr,       "Gradient of q"},
    {TESSERA_TENSOR(d_k),          Need::kBackward,        Dtypes::kAsQOrFloat32, LastAxis::kContiguous, Written::kBackward, Form::kKeys,     shapes::kDenseK,      shapes::kPackedK,            shapes::kNone,   "--dk",           nullptr,       "Gradient of k"},
    {TESSERA_TENSOR(d_v),          Need::kBackward,        Dtypes::kAsQOrFloat32, LastAxis::kContiguous, Written::kBackward, Form::kKeys,     shapes::kDenseV,      shapes::kPackedV,            shapes::kNone,   "--dv",           nullptr,       "Gradient of v"},
    {TESSERA_TENSOR(d_lse),        Need::kIfGivenBackward, Dtypes::kFloat32,      LastAxis::kAnyStride,  Written::kNever,    Form::kQueries,  shapes::kDenseLse,    shapes::kPackedLse,          shapes::kNone,   "--dlse",         nullptr,       "Cotangent of the log-sum-exp"},
    {TESSERA_TENSOR(d_bias),       Need::kIfGivenBackward, Dtypes::kFloat32,      LastAxis::kContiguous, Written::kBackward, Form::kLastAxes, shapes::kScores,      shapes::kNone,               shapes::kNone,   "--dbias",        nullptr,       "Gradient of the bias"},
    {TESSERA_TENSOR(d_sink),       Need::kIfGivenBackward, Dtypes::kFloat32,      LastAxis::kAnyStride,  Written::kBackward, Form::kByRank,   shapes::kPerHead,     shapes::kNone,               shapes::kNone,   "--dsink",        nullptr,       "Gradient of the sink"},
    {TESSERA_TENSOR(lse_low),      Need::kIfGiven,         Dtypes::kFloat32,      LastAxis::kAnyStride,  Written::kForward,  Form::kQueries,  shapes::kDenseLse,    shapes::kPackedLse,          shapes::kNone,   "--lse-low",      "lse_low",     "What the log-sum-exp's rounding leaves out"},
    {TESSERA_TENSOR(dropout_state), Need::kIfGiven,        Dtypes::kInt64,        LastAxis::kAnyStride,  Written::kNever,    Form::kByRank,   shapes::kPair,        shapes::kNone,               shapes::kNone,   "--dropout-state", "dropout state", "Seed and offset of the dropout, in place of --seed and --offset"},
    {TESSERA_TENSOR(q_descale),    Need::kIfGiven,         Dtypes::kFloat32,      LastAxis::kAnyStride,  Written::kNever,    Form::kScales,   shapes::kScalesQ,     shapes::kNone,               shapes::kScalesQ, "--q-descale",   "scales of q", "Scales of 8-bit queries"},
    {TESSERA_TENSOR(k_descale),    Need::kIfGiven,         Dtypes::kFloat32,      LastAxis::kAnyStride,  Written::kNever,    Form::kScales,   shapes::kScalesK,     shapes::kNone,               shapes::kScalesPaged, "--k-descale", "scales of k", "Scales of 8-bit keys"},
    {TESSERA_TENSOR(v_descale),    Need::kIfGiven,         Dtypes::kFloat32,      LastAxis::kAnyStride,  Written::kNever,    Form::kScales,   shapes::kScalesK,     shapes::kNone,               shapes::kScalesPaged, "--v-descale", "scales of v", "Scales of 8-bit values"},
    {TESSERA_TENSOR(places),       Need::kIfGiven,         Dtypes::kInt32,        LastAxis::kAnyStride,  Written::kNever,    Form::kByRank,   shapes::kPlaces,      shapes::kNone,               shapes::kNone,   "--places",       "places",      "First query, queries, first key and keys of each sequence in the whole"},
    {TESSERA_TENSOR(o_accum),      Need::kIfGiven,         Dtypes::kFloat32OrAsQ, LastAxis::kContiguous, Written::kNever,    Form::kQueries,  shapes::kDenseO,      shapes::kPackedO,            shapes::kNone,   "--o-accum",      "accumulated partial result", "Partial result with which the call's is merged, with --lse and --lse-low"},
};
#undef TESSERA_TENSOR
// clang-format on

inline constexpr int kNumTensors = std::size(kTensorFields);
static_assert(kNumTensors * sizeof(void*) + offsetof(tessera_buffers, q) + sizeof(tessera_buffers::captured) +
                      sizeof(tessera_buffers::d_captured) + sizeof(tessera_buffers::scalars) ==
                  sizeof(tessera_buffers),
              "a row for each pointer of tessera_buffers");

constexpr int tensor_index(std::string_view name) {
  for (int i = 0; i < kNumTensors; ++i) {
    if (name == kTensorFields[i].name) return i;
  }
  return -1;
}

// Where the last layout of tessera_problem and the last pointer of tessera_buffers end, in bytes.
struct FieldsEnd {
  size_t problem = 0, buffers = 0;
};
constexpr FieldsEnd fields_end() {
  FieldsEnd end;
  for (const TensorField& field : kTensorFields) {
    end.problem = std::max(end.problem, field.layout_at + sizeof(tessera_layout));
    end.buffers = std::max(end.buffers, field.pointer_at + sizeof(void*));
  }
  return end;
}

// A tensor's name in the source, checked at compile time: tensors["q"].
struct TensorName {
  consteval TensorName(const char* name) : index(tensor_index(name)) {  // written as the tensor itself
    if (index < 0) throw "no tensor of this name";
  }
  int index;
};

// Whether a direction reads or writes the tensor.
constexpr bool takes_part(const TensorField& field, bool backward) {
  if (field.need == Need::kIfGivenBackward) return backward;
  const bool gradient = field.need == Need::kBackward && field.written != Written::kForward;
  return !gradient || backward;
}

constexpr bool written(const TensorField& field, bool backward) {
  return field.written == (backward ? Written::kBackward : Written::kForward);
}

// True if every interface has a keyword for it, so not for a call's own tensors (q, k, v, their results and gradients).
constexpr bool is_option(const TensorField& field) {
  return field.need == Need::kIfGiven || field.need == Need::kIfGivenBackward;
}

// Partial results exist between calls: the command line, which makes one call, has no flag for them, and Python has
// arguments of its own.
constexpr bool of_several_calls(const TensorField& field) { return field.layout == &tessera_problem::o_accum; }

// The tensor of which a result of the backward pass is the gradient, such as bias for d_bias; nullptr for all others.
constexpr const TensorField* primal_of(const TensorField& field) {
  constexpr std::string_view kPrefix = "d_";
  if (field.written != Written::kBackward) return nullptr;
  return &kTensorFields[tensor_index(std::string_view(field.name).substr(kPrefix.size()))];
}

// True if it changes or hides scores: an input that is given for heads, queries or keys. (The sink is no score.)
constexpr bool changes_scores(const TensorField& field) {
  if (field.need != Need::kIfGiven || field.written != Written::kNever || field.layout == &tessera_problem::sink) {
    return false;
  }
  bool varies = false;
  for (int axis = 0; axis < field.dense.rank; ++axis) {
    switch (field.dense.axes[axis].symbol) {
      case kHq:
      case kSq:
      case kSk:
      case kBlocksQ:
      case kBlocksK:
        varies = true;
        break;
      case kB:
      case kTreeWords:
        break;
      default:
        return false;
    }
  }
  return varies;
}

// q, k, v, o and their gradients: [B, S, H, D], or packed or paged. (lse is not one: [B, H, S], nor is tree_mask.)
constexpr bool is_sequence(const TensorField& field) {
  return (field.form == Form::kQueries || field.form == Form::kKeys) && field.last_axis == LastAxis::kContiguous;
}

// "float32 or that of q"
constexpr const char* dtypes_text(Dtypes dtypes) {
  switch (dtypes) {
    case Dtypes::kFloating:
    case Dtypes::kAsQ:
      return "float32, float16, bfloat16, float64 or (forward) 8 bits";
    case Dtypes::kKeys:
      return "that of q or, with 16 bits in q, float8_e4m3, float8_e5m2 or int8";
    case Dtypes::kOutput:
      return "that of q or float32; with 8 bits in q bfloat16, float16 or float32";
    case Dtypes::kAsQOrFloat32:
      return "float32, float16, bfloat16 or float64";
    case Dtypes::kFloat32OrAsQ:
      return "float32 or that of q";
    case Dtypes::kFloat32:
      return "float32";
    case Dtypes::kInt32:
      return "int32";
    case Dtypes::kInt64:
      return "int64";
    case Dtypes::kBool:
      return "bool";
  }
  return "";
}

// The shape that a tensor of this problem has.
constexpr const Shape& shape_of(const TensorField& field, const tessera_problem& problem) {
  switch (field.form) {
    case Form::kQueries:
      return packed_q(problem) ? field.packed : field.dense;
    case Form::kKeys:
      return paged(problem) ? field.paged : packed_k(problem) ? field.packed : field.dense;
    case Form::kScales: {
      const int32_t rank = (problem.*field.layout).rank;
      return rank == 1        ? shapes::kScales
             : rank == 2      ? shapes::kScalesBatch
             : paged(problem) ? field.paged
                              : field.dense;
    }
    case Form::kByRank:
    case Form::kLastAxes:
      break;
  }
  const bool second = field.packed.rank != 0 && (problem.*field.layout).rank == field.packed.rank;
  return second ? field.packed : field.dense;  // alibi_slopes may have either
}

// ---- options that are not tensors -----------------------------------------------------------------------------------

enum class OptionKind {
  kFlag,
  kAlignment,  // a flag, true: top-left
  kNumber,
  kOptionalNumber,  // has_scale says whether it is given
  kInteger,
  kUnsigned,
  kPair,  // two integers
};

// A number of the problem; one of the pointers is set.
struct OptionMember {
  const char* name;
  int32_t tessera_problem::*flag = nullptr;
  int64_t tessera_problem::*integer = nullptr;
  uint64_t tessera_problem::*unsigned_integer = nullptr;
  double tessera_problem::*number = nullptr;
  double min = 0, max = 0;         // the accepted range, inclusive
  const char* accepted = nullptr;  // the same as text
  double smallest = 0;             // number: the smallest magnitude besides 0
};

struct OptionField {
  const char* name;  // in Python
  const char* flag;  // in the program; nullptr: none
  OptionKind kind;
  const char* value_name;  // in the program's help; nullptr: the default of its kind
  const char* what;
  OptionMember members[2];  // a pair has two
};

namespace detail {
constexpr double kMaxLengthOption = static_cast<double>(kMaxLength);
constexpr double kAnyInteger = 0x1p63;
constexpr double kAnyUnsigned = 18446744073709551615.0;
constexpr double kLargestBelow1 = 0x1.fffffffffffffp-1;
// The range of |scale| and softcap besides 0: kernels compute either times log2(e), and 4 scale / softcap, as normal
// float32 numbers.
constexpr double kMinFactor = 1e-18, kMaxFactor = 1e18;

constexpr OptionMember flag(const char* name, int32_t tessera_problem::*member) {
  return {.name = name, .flag = member, .max = 1, .accepted = "0 and 1"};
}
constexpr OptionMember window(const char* name, int64_t tessera_problem::*member) {
  return {name, nullptr, member, nullptr, nullptr, -1, kAnyInteger, "-1 (all) and any number of keys from 0"};
}
constexpr OptionMember length(const char* name, int64_t tessera_problem::*member) {
  return {name, nullptr, member, nullptr, nullptr, 0, kMaxLengthOption, "0 .. 2147483647"};
}
// A member that belongs to a block mask and is checked with it.
constexpr OptionMember block(const char* name, int64_t tessera_problem::*member) {
  return {name, nullptr, member, nullptr, nullptr, -kAnyInteger, kAnyInteger, "any integer"};
}
constexpr OptionMember word(const char* name, uint64_t tessera_problem::*member) {
  return {name, nullptr, nullptr, member, nullptr, 0, kAnyUnsigned, "0 .. 2^64 - 1"};
}
constexpr OptionMember number(const char* name, double tessera_problem::*member, double min, double max,
                              const char* accepted) {
  return {name, nullptr, nullptr, nullptr, member, min, max, accepted};
}
constexpr OptionMember factor(const char* name, double tessera_problem::*member, double min, const char* accepted) {
  return {name, nullptr, nullptr, nullptr, member, min, kMaxFactor, accepted, kMinFactor};
}
}  // namespace detail

// clang-format off
inline constexpr OptionField kOptionFields[] = {
    {"scale",           "--scale",           OptionKind::kOptionalNumber, nullptr,      "Factor of the scores (default: 1 / sqrt(D))",             {detail::factor("scale", &tessera_problem::scale, -detail::kMaxFactor, "0 and 1e-18 .. 1e18, of either sign")}},
    {"causal",          "--causal",          OptionKind::kFlag,           nullptr,      "A query sees no key right of the diagonal",               {detail::flag("causal", &tessera_problem::causal)}},
    {"top_left",        "--top-left",        OptionKind::kAlignment,      nullptr,      "The diagonal starts at the first key (default: ends at the last)", {{.name = "alignment", .flag = &tessera_problem::alignment, .max = 1, .accepted = "0 (bottom-right) and 1 (top-left)"}}},
    {"window",          "--window",          OptionKind::kPair,           "LEFT RIGHT", "Keys visible left and right of the diagonal, -1 for all", {detail::window("window_left", &tessera_problem::window_left), detail::window("window_right", &tessera_problem::window_right)}},
    {"softcap",         "--softcap",         OptionKind::kNumber,         "C",          "Scores become c tanh(s / c)",                             {detail::factor("softcap", &tessera_problem::softcap, 0, "0 (none) and 1e-18 .. 1e18")}},
    {"dropout_p",       "--dropout",         OptionKind::kNumber,         "P",          "Probability that an entry is dropped, below 1",           {detail::number("dropout_p", &tessera_problem::dropout_p, 0, detail::kLargestBelow1, "0 <= p < 1")}},
    {"dropout_seed",    "--seed",            OptionKind::kUnsigned,       nullptr,      "Seed of the dropout",                                     {detail::word("dropout_seed", &tessera_problem::dropout_seed)}},
    {"dropout_offset",  "--offset",          OptionKind::kUnsigned,       nullptr,      "Offset of the dropout's random numbers",                  {detail::word("dropout_offset", &tessera_problem::dropout_offset)}},
    {"mask_block",      "--mask-block",      OptionKind::kPair,           "Q K",        "Queries and keys that an entry of the block mask stands for", {detail::block("mask_block_q", &tessera_problem::mask_block_q), detail::block("mask_block_k", &tessera_problem::mask_block_k)}},
    {"max_seqlen_q",    "--max-seqlen-q",    OptionKind::kInteger,        nullptr,      "Packed: rows of the longest sequence, 0 for unknown",     {detail::length("max_seqlen_q", &tessera_problem::max_seqlen_q)}},
    {"max_seqlen_k",    "--max-seqlen-k",    OptionKind::kInteger,        nullptr,      "Packed or paged: keys of the longest sequence, 0 for unknown", {detail::length("max_seqlen_k", &tessera_problem::max_seqlen_k)}},
    {"max_prefix_k",    "--max-prefix-k",    OptionKind::kInteger,        nullptr,      "Shared prefixes: keys of the longest, 0 for unknown",     {detail::length("max_prefix_k", &tessera_problem::max_prefix_k)}},
    {"max_suffix_k",    "--max-suffix-k",    OptionKind::kInteger,        nullptr,      "Shared prefixes: the most keys of a sequence that are not read once, 0 for unknown", {detail::length("max_suffix_k", &tessera_problem::max_suffix_k)}},
    {"list_capacity",   "--list-capacity",   OptionKind::kInteger,        nullptr,      "Entries of the block lists of a program's mask on a GPU, 0: planning chooses", {detail::length("list_capacity", &tessera_problem::list_capacity)}},
    {"place_q",         "--place-q",         OptionKind::kPair,           "FIRST TOTAL", "Global place of the queries: the first, of how many",    {detail::length("first_q", &tessera_problem::first_q), detail::length("total_q", &tessera_problem::total_q)}},
    {"place_k",         "--place-k",         OptionKind::kPair,           "FIRST TOTAL", "Global place of the keys: the first, of how many",       {detail::length("first_k", &tessera_problem::first_k), detail::length("total_k", &tessera_problem::total_k)}},
    {"place_heads",     "--place-heads",     OptionKind::kPair,           "FIRST TOTAL", "Global place of the query heads: the first, of how many", {detail::length("first_head", &tessera_problem::first_head), detail::length("total_heads", &tessera_problem::total_heads)}},
    {"total_heads_kv",  "--total-heads-kv",  OptionKind::kInteger,        nullptr,      "KV heads of the whole, 0: as many for each query head as here", {detail::length("total_heads_kv", &tessera_problem::total_heads_kv)}},
    {"first_sequence",  "--first-sequence",  OptionKind::kInteger,        nullptr,      "Global number of the first sequence",                     {detail::length("first_sequence", &tessera_problem::first_sequence)}},
    {"accumulate",      nullptr,             OptionKind::kInteger,        nullptr,      "1: results are merged with those that the outputs hold",  {{.name = "accumulate", .integer = &tessera_problem::accumulate, .max = 1, .accepted = "0 and 1"}}},
    {"deterministic",   "--deterministic",   OptionKind::kFlag,           nullptr,      "Gradients have the same bits every time",                 {detail::flag("deterministic", &tessera_problem::deterministic)}},
    {"batch_invariant", "--batch-invariant", OptionKind::kFlag,           nullptr,      "A sequence's bits do not depend on its batch",            {detail::flag("batch_invariant", &tessera_problem::batch_invariant)}},
};
// clang-format on

constexpr bool of_several_calls(const OptionField& field) {
  return field.members[0].integer == &tessera_problem::accumulate;
}

}  // namespace tessera::core
