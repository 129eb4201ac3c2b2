// A score program over whole rows of scores, one operation after another, as plain code on arrays evaluates it: what
// standard attention and the float64 samples of `tessera compare` do with a program.
#pragma once

#include <memory>

#include "bound_program.hpp"
#include "peers/standard_attention.hpp"

namespace tessera::cli {

class ProgramRows : public peers::RowProgram {
 public:
  // An index outside its tensor reads 0; Tessera's own call on the same tensors has refused it.
  ProgramRows(const std::shared_ptr<const ScoreProgram>& program, const peers::AttentionShape& shape);

  void score(std::int64_t b, std::int64_t h, std::int64_t i, float* s, std::int64_t keys) const override;
  void score(std::int64_t b, std::int64_t h, std::int64_t i, double* s, std::int64_t keys) const override;
  void gradient(std::int64_t b, std::int64_t h, std::int64_t i, const float* s, float* d_s,
                std::int64_t keys) const override;
  void gradient(std::int64_t b, std::int64_t h, std::int64_t i, const double* s, double* d_s,
                std::int64_t keys) const override;

 private:
  template <class Real>
  void score_row(std::int64_t b, std::int64_t h, std::int64_t i, Real* s, std::int64_t keys) const;
  template <class Real>
  void gradient_row(std::int64_t b, std::int64_t h, std::int64_t i, const Real* s, Real* d_s, std::int64_t keys) const;

  BoundProgram forward_, reverse_;
  int d_s_;  // the gradient's value in reverse_; -1: 0
  peers::AttentionShape shape_;
};

}  // namespace tessera::cli
