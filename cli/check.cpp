#include "check.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

namespace tessera::cli {
namespace {

// Half the distance from 1 to the next number: the largest relative error of one rounding.
double unit_roundoff(tessera_dtype dtype) {
  switch (dtype) {
    case TESSERA_FLOAT16:
      return 0x1p-11;
    case TESSERA_BFLOAT16:
      return 0x1p-8;
    case TESSERA_FLOAT64:
      return 0x1p-53;
    default:
      return 0x1p-24;
  }
}

// A copy of the tensor for the oracle, each element moved up or down by `roundoff` at random.
Tensor moved(const Tensor& tensor, double roundoff, std::mt19937_64& random) {
  Tensor result = converted(tensor, TESSERA_FLOAT64);
  if (roundoff == 0) return result;
  for (std::int64_t i = 0; i < result.elems(); ++i) {
    result.as<double>()[i] *= (random() & 1U) != 0 ? 1 + roundoff : 1 - roundoff;
  }
  return result;
}

// The call in float64, on inputs moved by `roundoff`. Tensors that are always float32 are unchanged.
AttentionTensors in_float64(const AttentionTensors& tensors, double roundoff) {
  std::mt19937_64 random(1);
  AttentionTensors exact = tensors;
  for (const core::TensorField& field : core::kTensorFields) {
    const Tensor& original = tensors[field];
    const bool has_dtype_of_q = field.dtypes == core::Dtypes::kFloating || field.dtypes == core::Dtypes::kAsQ ||
                                field.dtypes == core::Dtypes::kKeys || field.dtypes == core::Dtypes::kOutput;
    if (!original.present()) continue;
    if (field.written == core::Written::kNever) {
      const bool rounded = has_dtype_of_q || field.dtypes == core::Dtypes::kFloat32OrAsQ;
      if (rounded) exact[field] = moved(original, roundoff, random);
      continue;
    }
    exact[field] = make_tensor(original.source, has_dtype_of_q ? TESSERA_FLOAT64 : TESSERA_FLOAT32, original.shape);
    exact[field].strides = original.strides;
  }
  if (tensors.program) {
    exact.program = std::make_shared<ScoreProgram>(*tensors.program);
    for (Tensor& tensor : exact.program->tensors) {
      const bool floating = tensor.dtype <= TESSERA_FLOAT64;
      if (floating)
        tensor = moved(tensor,
                       tensor.dtype == TESSERA_FLOAT64 ? 0
                       : roundoff == 0                 ? 0
                                                       : unit_roundoff(static_cast<tessera_dtype>(tensor.dtype)),
                       random);
    }
    for (Tensor& gradient : exact.program->gradients) {
      if (gradient.present()) gradient = make_tensor(gradient.source, TESSERA_FLOAT64, gradient.shape);
    }
  }
  return exact;
}

void run_oracle(const AttentionTensors& tensors, const AttentionOptions& options, tessera_device device,
                bool backward) {
  device.kernel = TESSERA_KERNEL_REFERENCE, device.family[0] = '\0';
  run_attention(tensors, options, device, TESSERA_FORWARD);
  if (backward) run_attention(tensors, options, device, TESSERA_BACKWARD);
}

}  // namespace

std::vector<OutputCheck> check_outputs(const AttentionTensors& tensors, const AttentionOptions& options,
                                       const tessera_device& device, bool backward) {
  const double roundoff = unit_roundoff(tensors["q"].dtype);
  const AttentionTensors exact = in_float64(tensors, 0);
  const AttentionTensors nearby = in_float64(tensors, roundoff);
  run_oracle(exact, options, device, backward);
  run_oracle(nearby, options, device, backward);

  // Only the sum of lse and lse_low is compared: lse_low holds the digits that lse's rounding dropped.
  const auto values_of = [](const AttentionTensors& from, const core::TensorField& field) {
    Tensor values = converted(from[field], TESSERA_FLOAT64);
    const bool is_lse = &field == &core::kTensorFields[core::TensorName("lse").index];
    if (!is_lse || !from["lse_low"].present()) return values;
    const Tensor low = converted(from["lse_low"], TESSERA_FLOAT64);
    for (std::int64_t i = 0; i < values.elems(); ++i) values.as<double>()[i] += low.as<double>()[i];
    return values;
  };
  std::vector<OutputCheck> checks;
  const auto add = [&checks](const std::string& name, const Tensor& result, const Tensor& values,
                             const Tensor& reference, const Tensor& near) {
    const auto error_of = [&](const Tensor& tensor) {
      return peers::error_of(tensor.memory.data(), tensor.dtype, reference.as<double>(), reference.elems());
    };
    double largest = 0, squares = 0;
    for (std::int64_t i = 0; i < reference.elems(); ++i) {
      const double value = reference.as<double>()[i];
      if (!std::isfinite(value)) continue;
      largest = std::max(largest, std::abs(value));
      squares += value * value;
    }
    const auto elems = static_cast<double>(std::max<std::int64_t>(1, reference.elems()));
    OutputCheck check{.name = name, .error = error_of(values), .allowed = error_of(near)};
    // Two roundings of the output: one when it is stored, one of its accumulator.
    const double stored = 2 * std::max(unit_roundoff(result.dtype), 0x1p-24);
    check.allowed.max_abs = kAllowedRoundings * check.allowed.max_abs + stored * largest;
    check.allowed.rms = kAllowedRoundings * check.allowed.rms + stored * std::sqrt(squares / elems);
    checks.push_back(check);
  };
  for (const core::TensorField& field : core::kTensorFields) {
    const Tensor& result = tensors[field];
    const bool computed = core::written(field, false) || (backward && core::written(field, true));
    if (!computed || !result.present() || &field == &core::kTensorFields[core::TensorName("lse_low").index]) continue;
    add(field.name, result, values_of(tensors, field), values_of(exact, field), values_of(nearby, field));
  }
  for (std::size_t n = 0; tensors.program && n < tensors.program->gradients.size(); ++n) {
    const Tensor& result = tensors.program->gradients[n];
    if (!result.present()) continue;
    add("d_" + tensors.program->names[n], result, converted(result, TESSERA_FLOAT64), exact.program->gradients[n],
        nearby.program->gradients[n]);
  }
  return checks;
}

}  // namespace tessera::cli
