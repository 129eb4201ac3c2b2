// Runs a lowered score program (code.hpp) over rows of vectors of scores. A step is one loop over the values of its
// level: one vector for the call, one for each vector of queries in a row, one for each row of keys, or all for pairs.
// One dispatch therefore serves up to kCodeRows rows.
#pragma once

#include "cpu/score/code.hpp"
#include "cpu/score/functions.hpp"
#include "cpu/transpose.hpp"

namespace tessera::cpu {
namespace {

// A register's vectors: row r and vector c are at data + r row + c vec floats.
struct CodeView {
  float* data;
  int64_t row, vec;
  TESSERA_INLINE float* at(int64_t r, int64_t c) const { return data + r * row + c * vec; }
};

// kKeysInLanes: the lanes of a vector are keys of one query. Otherwise they are queries, and a key's values are the
// same in all lanes.
template <int kVecs, bool kKeysInLanes>
class Interpreter {
 public:
  // `registers`: code_floats floats.
  TESSERA_INLINE Interpreter(const ScoreCode& code, float* registers) : code_(code) {
    for (int level = 0; level < kCodeLevels; ++level) {
      levels_[level] = registers;
      registers += code.registers[level] * kSizes[level] * kLanes;
    }
  }

  TESSERA_INLINE CodeView view(CodePlace place) const {
    static constexpr int64_t kRow[] = {0, 0, kLanes, kVecs * kLanes}, kVec[] = {0, kLanes, 0, kLanes};
    return {levels_[place.level] + place.index * kSizes[place.level] * kLanes, kRow[place.level], kVec[place.level]};
  }

  // The steps of the call and of the row of `vecs` vectors of queries. input(op, c): the words of an input of the call
  // or of a query.
  template <class Input>
  void begin(int vecs, const Input& input) {
    vecs_ = vecs;
    run(0, code_.ends[kOfQuery], 1, [&](core::score::Op op, int64_t, int c) { return input(op, c); });
  }
  // Rows 0 ... rows - 1, at most kCodeRows. input(op, r, c): the words of an input of a key or a pair.
  template <class Input>
  void run_rows(int rows, const Input& input) {
    run(code_.ends[kOfQuery], code_.ends[kOfPair], rows, input);
  }

 private:
  static constexpr int64_t kSizes[] = {1, kVecs, kCodeRows, kCodeRows* kVecs};

  template <class Input>
  void run(int begin, int end, int rows, const Input& input) {
    for (const CodeStep* step = code_.steps + begin; step < code_.steps + end; ++step) {
      const int level = step->result.level;
      const int r_end = level & kOfKey ? rows : 1, c_end = level & kOfQuery ? vecs_ : 1;
      if (step->op <= core::score::Op::kG) {
        const CodeView to = view(step->result);
        for (int r = 0; r < r_end; ++r)
          for (int c = 0; c < c_end; ++c) store(to.at(r, c), input(step->op, r, c));
      } else if (step->op == core::score::Op::kLoad) {
        load_elements(*step, r_end, c_end);
      } else {
        compute(*step, r_end, c_end);
      }
    }
  }

  // One operation over its vectors. Operands and results are words, whatever their type.
  template <class Body>
  TESSERA_INLINE void loop(const CodeStep& step, int r_end, int c_end, const Body& body) const {
    const CodeView to = view(step.result), a = view(step.operands[0]), b = view(step.operands[1]),
                   d = view(step.operands[2]);
    for (int r = 0; r < r_end; ++r)
      for (int c = 0; c < c_end; ++c) body(to.at(r, c), a.at(r, c), b.at(r, c), d.at(r, c));
  }
  template <class In, class Function>
  TESSERA_INLINE void unary(const CodeStep& step, int r_end, int c_end, const Function& f) const {
    loop(step, r_end, c_end, [&](float* to, const float* a, const float*, const float*) TESSERA_LAMBDA_INLINE {
      store(to, f(load_as<In>(a)));
    });
  }
  template <class In, class Function>
  TESSERA_INLINE void binary(const CodeStep& step, int r_end, int c_end, const Function& f) const {
    loop(step, r_end, c_end, [&](float* to, const float* a, const float* b, const float*) TESSERA_LAMBDA_INLINE {
      store(to, f(load_as<In>(a), load_as<In>(b)));
    });
  }

  TESSERA_OWN_FUNCTION void compute(const CodeStep& step, int r_end, int c_end) const {
    using core::score::Op;
    namespace f = score_functions;
    const auto of_float = [&](const auto& function)
                              TESSERA_LAMBDA_INLINE { unary<VecF>(step, r_end, c_end, function); };
    const auto of_int = [&](const auto& function) TESSERA_LAMBDA_INLINE { unary<VecI>(step, r_end, c_end, function); };
    const auto of_floats = [&](const auto& function)
                               TESSERA_LAMBDA_INLINE { binary<VecF>(step, r_end, c_end, function); };
    const auto of_ints = [&](const auto& function)
                             TESSERA_LAMBDA_INLINE { binary<VecI>(step, r_end, c_end, function); };
    const auto of_words = [&](const auto& function)
                              TESSERA_LAMBDA_INLINE { binary<VecU>(step, r_end, c_end, function); };
#define TESSERA_A(result) [](auto a) TESSERA_LAMBDA_INLINE { return result; }
#define TESSERA_AB(result) [](auto a, auto b) TESSERA_LAMBDA_INLINE { return result; }
    switch (step.op) {
      case Op::kConstant:
      case Op::kScalar:
        store(view(step.result).data, splat(step.bits));
        return;
      case Op::kAdd:
        return of_floats(TESSERA_AB(a + b));
      case Op::kSub:
        return of_floats(TESSERA_AB(a - b));
      case Op::kMul:
        return of_floats(TESSERA_AB(a * b));
      case Op::kDiv:
        return of_floats(TESSERA_AB(a / b));
      case Op::kNeg:
        return of_float(TESSERA_A(-a));
      case Op::kAbs:
        return of_float(TESSERA_A(abs(a)));
      case Op::kMin:
        return of_floats(TESSERA_AB(f::min_nan(a, b)));
      case Op::kMax:
        return of_floats(TESSERA_AB(f::max_nan(a, b)));
      case Op::kFloor:
        return of_float(TESSERA_A(f::floor(a)));
      case Op::kSign:
        return of_float(TESSERA_A(f::sign(a)));
      case Op::kIsNaN:
        return of_float(TESSERA_A(VecI(a != a)));
      case Op::kExp:
        return of_float(TESSERA_A(f::exp(a)));
      case Op::kExp2:
        return of_float(TESSERA_A(f::exp2(a)));
      case Op::kLog:
        return of_float(TESSERA_A(f::log(a)));
      case Op::kSqrt:
        return of_float(TESSERA_A(f::sqrt(a)));
      case Op::kRsqrt:
        return of_float(TESSERA_A(f::rsqrt(a)));
      case Op::kTanh:
        return of_float(TESSERA_A(f::tanh(a)));
      case Op::kSigmoid:
        return of_float(TESSERA_A(f::sigmoid(a)));
      case Op::kSin:
        return of_float(TESSERA_A(f::sin(a)));
      case Op::kCos:
        return of_float(TESSERA_A(f::cos(a)));
      case Op::kAddInt:
        return of_words(TESSERA_AB(a + b));
      case Op::kSubInt:
        return of_words(TESSERA_AB(a - b));
      case Op::kMulInt:
        return of_words(TESSERA_AB(a * b));
      case Op::kFloorDiv:
        return of_ints(TESSERA_AB(f::divide_down(a, b).quotient));
      case Op::kMod:
        return of_ints(TESSERA_AB(f::divide_down(a, b).remainder));
      case Op::kNegInt:
        return of_int(TESSERA_A(VecI(0u - (VecU)a)));
      case Op::kAbsInt:
        return of_int(TESSERA_A(f::abs_int(a)));
      case Op::kMinInt:
        return of_ints(TESSERA_AB(f::where_int(a < b, a, b)));
      case Op::kMaxInt:
        return of_ints(TESSERA_AB(f::where_int(a > b, a, b)));
      case Op::kAndInt:
      case Op::kAnd:
        return of_words(TESSERA_AB(a & b));
      case Op::kOrInt:
      case Op::kOr:
        return of_words(TESSERA_AB(a | b));
      case Op::kXorInt:
      case Op::kXor:
        return of_words(TESSERA_AB(a ^ b));
      case Op::kNotInt:
      case Op::kNot:
        return of_int(TESSERA_A(~a));
      case Op::kShiftLeft:
        return of_ints(TESSERA_AB(f::shift_left(a, b)));
      case Op::kShiftRight:
        return of_ints(TESSERA_AB(f::shift_right(a, b)));
      case Op::kLess:
        return of_floats(TESSERA_AB(VecI(a < b)));
      case Op::kLessEqual:
        return of_floats(TESSERA_AB(VecI(a <= b)));
      case Op::kEqual:
        return of_floats(TESSERA_AB(VecI(a == b)));
      case Op::kNotEqual:
        return of_floats(TESSERA_AB(VecI(a != b)));
      case Op::kLessInt:
        return of_ints(TESSERA_AB(a < b));
      case Op::kLessEqualInt:
        return of_ints(TESSERA_AB(a <= b));
      case Op::kEqualInt:
        return of_ints(TESSERA_AB(a == b));
      case Op::kNotEqualInt:
        return of_ints(TESSERA_AB(a != b));
      case Op::kWhere:
      case Op::kWhereInt:
      case Op::kWhereBool:
        return loop(step, r_end, c_end,
                    [](float* to, const float* a, const float* b, const float* d) TESSERA_LAMBDA_INLINE {
                      store(to, f::where_int(load_as<VecI>(a), load_as<VecI>(b), load_as<VecI>(d)));
                    });
      case Op::kIntToFloat:
        return of_int(TESSERA_A(to_float(a)));
      case Op::kBoolToFloat:
        return of_int(TESSERA_A(select(a, splat(1.0f), VecF{})));
      case Op::kFloatToInt:
        return of_float(TESSERA_A(f::to_int(a)));
      case Op::kBoolToInt:
        return of_int(TESSERA_A(a & 1));
      default:
        return;  // inputs and loads are handled in `run`
    }
#undef TESSERA_A
#undef TESSERA_AB
  }

  // The word of one element at `address`.
  TESSERA_INLINE static uint32_t element(const char* address, int32_t dtype) {
    const auto as = [&]<class T>() TESSERA_LAMBDA_INLINE {
      T x;
      __builtin_memcpy(&x, address, sizeof x);
      return x;
    };
    const auto of_float = [](float x) TESSERA_LAMBDA_INLINE { return __builtin_bit_cast(uint32_t, x); };
    switch (dtype) {
      case TESSERA_FLOAT16:
        return of_float(float_from_f16(VecH{} + as.template operator()<uint16_t>())[0]);
      case TESSERA_BFLOAT16:
        return uint32_t{as.template operator()<uint16_t>()} << 16;
      case TESSERA_FLOAT64:
        return of_float(static_cast<float>(as.template operator()<double>()));
      case TESSERA_BOOL:
        return *address ? ~0u : 0u;
      case TESSERA_UINT8:
        return as.template operator()<uint8_t>();
      case TESSERA_INT8:
        return static_cast<uint32_t>(as.template operator()<int8_t>());
      case TESSERA_INT16:
        return static_cast<uint32_t>(as.template operator()<int16_t>());
      case TESSERA_INT64:
        return static_cast<uint32_t>(as.template operator()<int64_t>());
      default:
        return as.template operator()<uint32_t>();  // float32, int32
    }
  }

  // Elements of a tensor. An index outside the tensor gives 0, and nothing is read.
  TESSERA_OWN_FUNCTION void load_elements(const CodeStep& step, int r_end, int c_end) const {
    const CodeTensor& tensor = code_.tensors[step.tensor];
    const CodeView to = view(step.result);
    CodeView index[core::score::kMaxRank];
    for (int axis = 0; axis < tensor.rank; ++axis) index[axis] = view(step.operands[axis]);
    if constexpr (!kKeysInLanes) {
      if (load_along_keys(tensor, to, index, r_end, c_end)) return;
    }
    // If all lanes read the same element, it is read once.
    const bool one = (step.result.level & (kKeysInLanes ? kOfKey : kOfQuery)) == 0;
    for (int r = 0; r < r_end; ++r) {
      for (int c = 0; c < c_end; ++c) {
        VecI inside = splat(-1);
        for (int axis = 0; axis < tensor.rank; ++axis) {
          const VecI at = load_as<VecI>(index[axis].at(r, c));
          inside &= (VecU)at < static_cast<uint32_t>(tensor.shape[axis]);
        }
        if (one) {
          int64_t offset = 0;
          for (int axis = 0; axis < tensor.rank; ++axis) {
            offset += tensor.stride[axis] * load_as<VecI>(index[axis].at(r, c))[0];
          }
          store(to.at(r, c), splat(inside[0] ? element(tensor.data + offset, tensor.dtype) : 0u));
          continue;
        }
        if (tensor.near) {
          VecI offset{};
          for (int axis = 0; axis < tensor.rank; ++axis) {
            offset += load_as<VecI>(index[axis].at(r, c)) * static_cast<int32_t>(tensor.stride[axis]);
          }
          store(to.at(r, c), gather(tensor, offset, inside));
          continue;
        }
        VecU words{};
        for (int lane = 0; lane < kLanes; ++lane) {
          if (!inside[lane]) continue;
          int64_t offset = 0;
          for (int axis = 0; axis < tensor.rank; ++axis) {
            offset += tensor.stride[axis] * load_as<VecI>(index[axis].at(r, c))[lane];
          }
          words[lane] = element(tensor.data + offset, tensor.dtype);
        }
        store(to.at(r, c), words);
      }
    }
  }

  // For lanes = queries: loads a lane's elements of all rows by a transposition if they are adjacent, as for [i, j].
  // false: they are not, or may be outside the tensor.
  TESSERA_OWN_FUNCTION bool load_along_keys(const CodeTensor& tensor, const CodeView& to,
                                            const CodeView (&index)[core::score::kMaxRank], int r_end,
                                            int c_end) const {
    const bool of_floats =
        tensor.dtype == TESSERA_FLOAT32 || tensor.dtype == TESSERA_FLOAT16 || tensor.dtype == TESSERA_BFLOAT16;
    if (!tensor.near || !of_floats || tensor.rank == 0 || r_end < 2 || c_end < 2) return false;
    const int32_t bytes = tensor.dtype == TESSERA_FLOAT32 ? 4 : 2;
    alignas(64) int32_t first[kVecs * kLanes];
    VecI apart{};
    for (int c = 0; c < c_end; ++c) {
      VecI start{};
      for (int r = 0; r < r_end; ++r) {
        VecI offset{};
        for (int axis = 0; axis < tensor.rank; ++axis) {
          const VecI at = load_as<VecI>(index[axis].at(r, c));
          apart |= (VecU)at >= static_cast<uint32_t>(tensor.shape[axis]);
          offset += at * static_cast<int32_t>(tensor.stride[axis]);
        }
        if (r == 0) start = offset;
        apart |= offset != start + r * bytes;
      }
      store(first + c * kLanes, start);
      if (any(apart)) return false;
    }
    const char* rows[kVecs * kLanes];
    for (int lane = 0; lane < c_end * kLanes; ++lane) rows[lane] = tensor.data + first[lane];
    static_assert(kKeysInLanes || kVecs * kLanes == kBlockM || kVecs == 1, "rows of a tile");
    if (kVecs * kLanes != kBlockM) return false;
    with_float_elem(tensor.dtype,
                    [&](auto elem) { pack_transposed<decltype(elem)>(to.data, rows, c_end * kLanes, r_end); });
    return true;
  }

  TESSERA_INLINE static VecU gather(const CodeTensor& tensor, VecI offset, VecI inside) {
    const bool all = !any(~inside);
    const bool of_floats =
        tensor.dtype == TESSERA_FLOAT32 || tensor.dtype == TESSERA_FLOAT16 || tensor.dtype == TESSERA_BFLOAT16;
    if (all && of_floats) {  // adjacent elements, as for i - j
      VecU words{};
      bool neighbours = false;
      with_float_elem(tensor.dtype, [&](auto elem) TESSERA_LAMBDA_INLINE {
        using Elem = decltype(elem);
        neighbours = !any(offset != offset[0] + iota<VecI>() * Elem::kBytes);
        if (neighbours) words = (VecU)Elem::read(tensor.data + offset[0]);
      });
      if (neighbours) return words;
    }
    if constexpr (kGathersWords) {
      if (tensor.dtype == TESSERA_FLOAT32 || tensor.dtype == TESSERA_INT32) {
        return gather_words(tensor.data, offset, inside);
      }
    }
    VecU words{};
    for (int lane = 0; lane < kLanes; ++lane) {
      if (inside[lane]) words[lane] = element(tensor.data + offset[lane], tensor.dtype);
    }
    return words;
  }

  const ScoreCode& code_;
  float* levels_[kCodeLevels];
  int vecs_ = kVecs;
};

}  // namespace
}  // namespace tessera::cpu
