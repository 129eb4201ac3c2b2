#include "score_options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "error.hpp"
#include "files.hpp"
#include "options.hpp"

namespace tessera::cli {
namespace {

struct Binding {
  std::string name, value;
};

Binding split(const std::string& flag, const std::string& text) {
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0 || equals + 1 == text.size()) {
    throw WrongUse(fmt::format("{}: '{}', accepted NAME=VALUE", flag, text));
  }
  return {text.substr(0, equals), text.substr(equals + 1)};
}

struct Number {
  tessera_value_type type;
  double value;
};

// "0.5" is a float, "8" an int, "true" a bool; none: a file.
std::optional<Number> number_of(const std::string& text) {
  if (text == "true" || text == "false") return Number{TESSERA_VALUE_BOOL, text == "true" ? 1.0 : 0.0};
  const char* const end = text.data() + text.size();
  std::int32_t integer = 0;
  if (const auto read = std::from_chars(text.data(), end, integer); read.ec == std::errc() && read.ptr == end) {
    return Number{TESSERA_VALUE_INT, static_cast<double>(integer)};
  }
  double number = 0;
  if (const auto read = std::from_chars(text.data(), end, number); read.ec == std::errc() && read.ptr == end) {
    return Number{TESSERA_VALUE_FLOAT, number};
  }
  return std::nullopt;
}

constexpr tessera_dtype kDtypes[] = {TESSERA_FLOAT32, TESSERA_FLOAT16, TESSERA_BFLOAT16, TESSERA_FLOAT64,
                                     TESSERA_INT32,   TESSERA_INT64,   TESSERA_BOOL,     TESSERA_INT8,
                                     TESSERA_INT16,   TESSERA_UINT8};

// "float32[8, 1024]": a tensor without memory.
std::optional<Tensor> layout_of(const std::string& source, const std::string& text) {
  const std::size_t open = text.find('[');
  if (open == std::string::npos || !text.ends_with(']')) return std::nullopt;
  const auto* const dtype = std::ranges::find(kDtypes, text.substr(0, open), tessera_dtype_name);
  if (dtype == std::end(kDtypes)) return std::nullopt;
  Tensor tensor{.source = source, .dtype = *dtype, .shape = {}, .strides = {}, .memory = {}};
  const char *at = text.data() + open + 1, *const end = text.data() + text.size() - 1;
  while (at != end) {
    std::int64_t extent = 0;
    const std::from_chars_result read = std::from_chars(at, end, extent);
    if (read.ec != std::errc() || extent < 0) return std::nullopt;
    tensor.shape.push_back(extent);
    at = read.ptr;
    if (at != end && *at != ',') return std::nullopt;
    if (at != end) ++at;
    while (at != end && *at == ' ') ++at;
  }
  tensor.strides.resize(tensor.shape.size());
  std::int64_t stride = 1;
  for (std::size_t axis = tensor.shape.size(); axis-- > 0; stride *= std::max<std::int64_t>(1, tensor.shape[axis])) {
    tensor.strides[axis] = stride;
  }
  return tensor;
}

Tensor tensor_of(FileTensor file) {
  switch (file.element) {
    case Element::kInt32:
      return as_int32(std::move(file));
    case Element::kInt64:
      return as_int64(std::move(file));
    case Element::kBool:
      return as_bool(std::move(file));
    default:
      return as_floating(std::move(file), false);
  }
}

tessera_value_type type_of(const Tensor& tensor) {
  switch (tensor.dtype) {
    case TESSERA_FLOAT32:
    case TESSERA_FLOAT16:
    case TESSERA_BFLOAT16:
    case TESSERA_FLOAT64:
      return TESSERA_VALUE_FLOAT;
    case TESSERA_BOOL:
      return TESSERA_VALUE_BOOL;
    default:
      return TESSERA_VALUE_INT;
  }
}

}  // namespace

std::string ScoreProgram::text(tessera_program_text which) const {
  std::string text(tessera_program_describe(handle.get(), which, nullptr, 0), '\0');
  tessera_program_describe(handle.get(), which, text.data(), text.size() + 1);
  return text;
}

void ScoreProgram::ask_for_gradients() {
  for (std::size_t n = 0; n < tensors.size(); ++n) {
    if (type_of(tensors[n]) == TESSERA_VALUE_FLOAT) gradients[n] = tensors[n];
  }
}

void ScoreProgram::describe(tessera_problem& problem) const {
  problem.program = handle.get();
  for (std::size_t n = 0; n < tensors.size(); ++n) {
    problem.captured[n] = tensors[n].layout();
    if (gradients[n].present() && problem.direction == TESSERA_BACKWARD) problem.d_captured[n] = gradients[n].layout();
  }
}

void ScoreProgram::add_to(tessera_buffers& buffers) const {
  for (std::size_t n = 0; n < tensors.size(); ++n) {
    buffers.captured[n] = tensors[n].memory.data();
    buffers.d_captured[n] = gradients[n].memory.data();
  }
  std::ranges::copy(scalars, buffers.scalars);
}

void ScoreOptions::add_to(CLI::App& command) {
  const auto grouped = [](CLI::Option* option, const char* type) { option->type_name(type)->group("Attention"); };
  grouped(command.add_option("--score-mod", score_, "A new score, of s: \"50 * tanh(s / 50) + bias[h, i - j + 512]\""),
          "TEXT");
  grouped(command.add_option("--mask-mod", mask_, "Whether a key is visible: \"j <= q_pos && doc[b, i] == doc[b, j]\""),
          "TEXT");
  grouped(command.add_option("--bind", bindings_, "What a name in these texts is: a number, or a tensor's file"),
          "NAME=VALUE ...");
}

void ScoreOptions::add_gradients_to(CLI::App& command) {
  command.add_option("--dbind", gradient_files_, "Gradients of tensors that --bind names")
      ->type_name("NAME=FILE ...")
      ->group("Results");
}

std::shared_ptr<ScoreProgram> ScoreOptions::program(bool of_layouts) const {
  if (score_.empty() && mask_.empty()) {
    const auto refuse = [](const char* flag, const std::string& text) {
      throw WrongUse(
          fmt::format("{} {}: given without a program, accepted with --score-mod or --mask-mod", flag, text));
    };
    if (!bindings_.empty()) refuse("--bind", bindings_[0]);
    if (has_gradients()) refuse("--dbind", gradient_files_[0]);
    return nullptr;
  }
  auto result = std::make_shared<ScoreProgram>();
  std::vector<Binding> bindings;
  for (const std::string& text : bindings_) bindings.push_back(split("--bind", text));
  std::vector<tessera_program_name> names;
  for (const auto& [name, value] : bindings) {
    if (const std::optional<Number> number = number_of(value)) {
      names.push_back({name.c_str(), number->type, TESSERA_SCALAR_RANK});
      result->scalars.push_back(number->value);
      continue;
    }
    const std::string source = "--bind " + name + "=" + value;
    std::optional<Tensor> tensor = of_layouts ? layout_of(source, value) : std::nullopt;
    Shape shape;
    if (tensor) {
      shape = tensor->shape;
      if (shape.empty()) tensor->shape = {1}, tensor->strides = {1};
    } else {
      FileTensor file = read_tensor_file(value, source, name);
      shape = file.shape;
      if (shape.empty()) file.shape = {1};
      tensor = tensor_of(std::move(file));
    }
    names.push_back({name.c_str(), type_of(*tensor), static_cast<std::int32_t>(shape.size())});
    result->shapes.push_back(shape);
    result->names.push_back(name);
    result->tensors.push_back(std::move(*tensor));
  }
  tessera_program* made = nullptr;
  const tessera_status status = tessera_program_create(score_.c_str(), mask_.c_str(), names.data(),
                                                       static_cast<std::int32_t>(names.size()), &made);
  if (status.code != TESSERA_OK) throw WrongUse(fmt::format("--score-mod, --mask-mod: {}", status.message));
  result->handle.reset(made, tessera_program_release);
  for (const tessera_program_name& name : names) {
    const bool is_tensor = name.rank != TESSERA_SCALAR_RANK;
    result->declared.push_back(
        {name.name, static_cast<core::score::Type>(name.type), is_tensor ? name.rank : 0, is_tensor});
  }

  result->gradients.resize(result->tensors.size()), result->files.resize(result->tensors.size());
  for (const std::string& text : gradient_files_) {
    const Binding binding = split("--dbind", text);
    const auto named = std::ranges::find(result->names, binding.name);
    if (named == result->names.end()) {
      throw WrongUse(fmt::format("--dbind {}: '{}' is no tensor that --bind names", text, binding.name));
    }
    const auto slot = static_cast<std::size_t>(named - result->names.begin());
    const Tensor& tensor = result->tensors[slot];
    result->gradients[slot] = make_tensor("--dbind " + text, tensor.dtype, tensor.shape);
    result->files[slot] = binding.value;
  }
  return result;
}

}  // namespace tessera::cli
