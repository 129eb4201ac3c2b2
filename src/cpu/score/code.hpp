// A score program in the form that the kernels run: lowered once for each call (lower.hpp), executed by vectors of
// lanes (interpreter.hpp). Plain data, shared by units that are compiled for different instruction sets.
#pragma once

#include <cstdint>

#include "core/score/op.hpp"

namespace tessera::cpu {

// What a value depends on; a pair is a query and a key.
enum CodeLevel : uint8_t { kOfCall = 0, kOfQuery = 1, kOfKey = 2, kOfPair = 3, kCodeLevels = 4 };

// A register: one vector for the call, one for each vector of queries, one for each row of keys, or one for each vector
// of scores.
struct CodePlace {
  int16_t index = -1;  // among the registers of its level; -1: none
  uint8_t level = kOfCall;
};

// The first two registers of pairs are not stored: they are the kernel's rows of s and g themselves.
enum PairInput : int16_t { kRowsOfS, kRowsOfG, kPairInputs };

struct CodeTensor {
  const char* data;
  int32_t dtype, rank;
  // Strides in bytes. Elements that no 32-bit index reaches are not counted in `shape`.
  int64_t stride[core::score::kMaxRank];
  int32_t shape[core::score::kMaxRank];
  bool near;  // all offsets fit 32 bits
};

struct CodeStep {
  core::score::Op op;
  core::score::Type type;
  int16_t tensor = -1;  // kLoad
  CodePlace result;
  CodePlace operands[core::score::kMaxOperands];
  uint32_t bits = 0;  // kConstant, kScalar: the register's words
  // kLoad: its indices are operands[axis] + of_key[axis] * key, so that no pair's index is computed where keys count
  // an index up or down. key: j; none if all factors are 0.
  int32_t of_key[core::score::kMaxRank] = {};
  CodePlace key;
};

// One load, whose element receives the gradient `adjoint`.
struct CodeGradient {
  int16_t tensor;
  CodePlace indices[core::score::kMaxRank];
  CodePlace adjoint;
  uint8_t level;  // the level of all indices together
};

struct ScoreCode {
  // In the order of levels; the steps of level n end at ends[n].
  const CodeStep* steps;
  int32_t ends[kCodeLevels];
  int32_t registers[kCodeLevels];  // stored ones
  const CodeTensor* tensors;
  CodePlace score, mask;  // a program's results
  CodePlace d_s;          // a gradient's
  const CodeGradient* gradients;
  int32_t num_gradients;
};

constexpr int kCodeRows = 8;  // rows of scores at a time

// Floats of a code's registers, with `vecs` vectors in a row.
static constexpr int64_t code_floats(const ScoreCode& code, int64_t vecs, int64_t lanes) {
  // At least one: plans know by it that there is a program.
  const int64_t vectors = 1 + code.registers[kOfCall] + code.registers[kOfQuery] * vecs +
                          code.registers[kOfKey] * kCodeRows + code.registers[kOfPair] * kCodeRows * vecs;
  return vectors * lanes;
}

}  // namespace tessera::cpu
