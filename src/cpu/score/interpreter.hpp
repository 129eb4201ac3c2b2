// Runs a lowered score program (code.hpp) over rows of vectors of scores. A step is one loop over the values of its
// level: one vector for the call, one for each vector of queries in a row, one for each row of keys, or all for pairs.
// One dispatch therefore serves up to kCodeRows rows.
#pragma once

#include "cpu/score/code.hpp"
#include "cpu/score/functions.hpp"
#include "cpu/transpose.hpp"

namespace tessera::cpu {
namespace {

// A register's vectors: row r and vector c are at data + r row + c vec floats. Those of g are only read.
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
    if (place.level == kOfPair && place.index < kPairInputs) return inputs_[place.index];
    static constexpr int64_t kRow[] = {0, 0, kLanes, kVecs * kLanes}, kVec[] = {0, kLanes, 0, kLanes};
    const int64_t index = place.index - (place.level == kOfPair ? kPairInputs : 0);
    return {levels_[place.level] + index * kSizes[place.level] * kLanes, kRow[place.level], kVec[place.level]};
  }

  // The steps of the call and of the row of `vecs` vectors of queries. input(op, c): the words of an input of the call
  // or of a query.
  template <class Input>
  void begin(int vecs, const Input& input) {
    vecs_ = vecs;
    run(0, code_.ends[kOfQuery], 1, [&](core::score::Op op, int64_t, int c) { return input(op, c); });
  }
  // Rows 0 ... rows - 1, at most kCodeRows, of s and of g. keys(r): the words of j.
  template <class Keys>
  void run_rows(int rows, const CodeView& s, const CodeView& g, const Keys& keys) {
    inputs_[kRowsOfS] = s, inputs_[kRowsOfG] = g;
    run(code_.ends[kOfQuery], code_.ends[kOfPair], rows,
        [&](core::score::Op, int64_t r, int) TESSERA_LAMBDA_INLINE { return keys(r); });
  }

 private:
  static constexpr bool kIsTile = !kKeysInLanes && kVecs * kLanes == kBlockM;
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

  // A step's registers and how many vectors they have.
  struct Loop {
    CodeView to, a, b, d;
    int r_end, c_end;

    // One operation over its vectors. Operands and results are words, whatever their type.
    template <class Body>
    TESSERA_INLINE void operator()(const Body& body) const {
      for (int r = 0; r < r_end; ++r)
        for (int c = 0; c < c_end; ++c) body(to.at(r, c), a.at(r, c), b.at(r, c), d.at(r, c));
    }
    template <class In, class Function>
    TESSERA_INLINE void unary(const Function& f) const {
      (*this)([&](float* result, const float* x, const float*, const float*)
                  TESSERA_LAMBDA_INLINE { store(result, f(load_as<In>(x))); });
    }
    template <class In, class Function>
    TESSERA_INLINE void binary(const Function& f) const {
      (*this)([&](float* result, const float* x, const float* y, const float*)
                  TESSERA_LAMBDA_INLINE { store(result, f(load_as<In>(x), load_as<In>(y))); });
    }
  };

  TESSERA_OWN_FUNCTION void compute(const CodeStep& step, int r_end, int c_end) const {
    using core::score::Op;
    namespace f = score_functions;
    const Loop loop{
        view(step.result), view(step.operands[0]), view(step.operands[1]), view(step.operands[2]), r_end, c_end};
    const auto of_float = [&](const auto& function) TESSERA_LAMBDA_INLINE { loop.template unary<VecF>(function); };
    const auto of_int = [&](const auto& function) TESSERA_LAMBDA_INLINE { loop.template unary<VecI>(function); };
    const auto of_floats = [&](const auto& function) TESSERA_LAMBDA_INLINE { loop.template binary<VecF>(function); };
    const auto of_ints = [&](const auto& function) TESSERA_LAMBDA_INLINE { loop.template binary<VecI>(function); };
    const auto of_words = [&](const auto& function) TESSERA_LAMBDA_INLINE { loop.template binary<VecU>(function); };
#define TESSERA_A(result) [](auto a) TESSERA_LAMBDA_INLINE { return result; }
#define TESSERA_AB(result) [](auto a, auto b) TESSERA_LAMBDA_INLINE { return result; }
    switch (step.op) {
      case Op::kConstant:
      case Op::kScalar:
        store(loop.to.data, splat(step.bits));
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
        return loop([](float* to, const float* a, const float* b, const float* d) TESSERA_LAMBDA_INLINE {
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
  TESSERA_OWN_FUNCTION static uint32_t element(const char* address, int32_t dtype) {
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
    if constexpr (kIsTile) {
      bool of_key = false;
      for (int axis = 0; axis < code_.tensors[step.tensor].rank; ++axis) {
        of_key |= (step.operands[axis].level & kOfKey) != 0;
      }
      if (!of_key && code_.tensors[step.tensor].near) return load_counted(step, r_end, c_end);
    }
    load_any(step, r_end, 0, c_end);
  }

  TESSERA_INLINE VecI index_of(const CodeStep& step, int axis, int64_t r, int64_t c) const {
    const VecI at = load_as<VecI>(view(step.operands[axis]).at(r, c));
    if (step.of_key[axis] == 0) return at;
    return (VecI)((VecU)at + load_as<VecU>(view(step.key).at(r, c)) * static_cast<uint32_t>(step.of_key[axis]));
  }

  TESSERA_OWN_FUNCTION void load_any(const CodeStep& step, int r_end, int c_begin, int c_end) const {
    const CodeTensor& tensor = code_.tensors[step.tensor];
    const CodeView to = view(step.result);
    // If all lanes read the same element, it is read once.
    const bool one = (step.result.level & (kKeysInLanes ? kOfKey : kOfQuery)) == 0;
    for (int r = 0; r < r_end; ++r) {
      for (int c = c_begin; c < c_end; ++c) {
        VecI index[core::score::kMaxRank], inside = splat(-1);
        for (int axis = 0; axis < tensor.rank; ++axis) {
          index[axis] = index_of(step, axis, r, c);
          inside &= (VecU)index[axis] < static_cast<uint32_t>(tensor.shape[axis]);
        }
        const auto offset_of = [&](int lane) TESSERA_LAMBDA_INLINE {
          int64_t offset = 0;
          for (int axis = 0; axis < tensor.rank; ++axis) offset += tensor.stride[axis] * index[axis][lane];
          return offset;
        };
        if (one) {
          store(to.at(r, c), splat(inside[0] ? element(tensor.data + offset_of(0), tensor.dtype) : 0u));
          continue;
        }
        if (tensor.near) {
          VecI offset{};
          for (int axis = 0; axis < tensor.rank; ++axis) {
            offset += index[axis] * static_cast<int32_t>(tensor.stride[axis]);
          }
          store(to.at(r, c), gather(tensor, offset, inside));
          continue;
        }
        VecU words{};
        for (int lane = 0; lane < kLanes; ++lane) {
          if (inside[lane]) words[lane] = element(tensor.data + offset_of(lane), tensor.dtype);
        }
        store(to.at(r, c), words);
      }
    }
  }

  // For tiles of queries and indices that keys count up or down: offsets are computed for the first row only; those of
  // the others follow by a constant.
  TESSERA_OWN_FUNCTION void load_counted(const CodeStep& step, int r_end, int c_end) const {
    const CodeTensor& tensor = code_.tensors[step.tensor];
    const CodeView to = view(step.result);
    int64_t row_bytes = 0;
    for (int axis = 0; axis < tensor.rank; ++axis) row_bytes += step.of_key[axis] * tensor.stride[axis];
    for (int c = 0; c < c_end; ++c) {
      VecI offset{}, inside = splat(-1);
      for (int axis = 0; axis < tensor.rank; ++axis) {
        const VecI begin = index_of(step, axis, 0, c);
        const VecU end = (VecU)begin + static_cast<uint32_t>(step.of_key[axis] * (r_end - 1));
        const uint32_t extent = static_cast<uint32_t>(tensor.shape[axis]);
        inside &= ((VecU)begin < extent) & (end < extent);
        offset += begin * static_cast<int32_t>(tensor.stride[axis]);
      }
      if (any(~inside)) {
        load_any(step, r_end, c, c + 1);
      } else {
        load_inside(tensor, offset, row_bytes, r_end, [&](int r) TESSERA_LAMBDA_INLINE { return to.at(r, c); });
      }
    }
  }

  // Lanes of the first row at `offset`, the next rows row_bytes apart, all of them inside.
  template <class To>
  TESSERA_INLINE static void load_inside(const CodeTensor& tensor, VecI offset, int64_t row_bytes, int r_end,
                                         const To& to) {
    const int32_t lane_bytes = offset[1] - offset[0];
    const bool in_step = !any(offset != offset[0] + iota<VecI>() * lane_bytes);
    if (in_step && lane_bytes == 0) {
      const char* from = tensor.data + offset[0];
      for (int r = 0; r < r_end; ++r, from += row_bytes) store(to(r), splat(element(from, tensor.dtype)));
      return;
    }
    const bool words = tensor.dtype == TESSERA_FLOAT32 || tensor.dtype == TESSERA_INT32;
    if (words || tensor.dtype == TESSERA_FLOAT16 || tensor.dtype == TESSERA_BFLOAT16) {
      bool done = true;
      with_float_elem(words ? static_cast<int32_t>(TESSERA_FLOAT32) : tensor.dtype, [&](auto elem) {
        using Elem = decltype(elem);
        if (in_step && lane_bytes == Elem::kBytes) {
          const char* from = tensor.data + offset[0];
          for (int r = 0; r < r_end; ++r, from += row_bytes) store(to(r), Elem::read(from));
        } else if (in_step && lane_bytes == -Elem::kBytes) {
          const char* from = tensor.data + offset[kLanes - 1];
          for (int r = 0; r < r_end; ++r, from += row_bytes) store(to(r), reversed(Elem::read(from)));
        } else if (kVecs * kLanes == kBlockM &&
                   row_bytes == Elem::kBytes) {  // rows of the tensor are lanes, as in [i, j]
          const char* rows[kLanes];
          for (int lane = 0; lane < kLanes; ++lane) rows[lane] = tensor.data + offset[lane];
          pack_transposed<Elem>(to(0), rows, kLanes, r_end);
        } else {
          done = false;
        }
      });
      if (done) return;
    }
    CodeTensor row = tensor;
    for (int r = 0; r < r_end; ++r, row.data += row_bytes) store(to(r), gather(row, offset, splat(-1)));
  }

  TESSERA_INLINE static VecF reversed(VecF v) {
    VecF result{};
    for (int lane = 0; lane < kLanes; ++lane) result[lane] = v[kLanes - 1 - lane];
    return result;
  }

  // The elements of a vector of offsets.
  TESSERA_INLINE static VecU gather(const CodeTensor& tensor, VecI offset, VecI inside) {
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
  CodeView inputs_[kPairInputs]{};
  int vecs_ = kVecs;
};

}  // namespace
}  // namespace tessera::cpu
