// tessera run: attention on the user's own tensors.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "attention_call.hpp"
#include "check.hpp"
#include "commands.hpp"
#include "core/dtypes.hpp"
#include "error.hpp"
#include "extents.hpp"
#include "files.hpp"
#include "interrupts.hpp"
#include "options.hpp"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

struct RunOptions {
  std::array<std::string, core::kNumTensors> files;  // of each tensor; "" if none
  std::string dtype, dtype_kv, layout = "bshd";
  bool check = false, json = false;
  AttentionOptions attention;
  ScoreOptions score;
  DeviceOptions device;

  const std::string& file(const core::TensorField& field) const { return files[&field - core::kTensorFields]; }
  const std::string& file(core::TensorName name) const { return files[name.index]; }
};

// The flag of a tensor's file.
const char* argument_of(const core::TensorField& field) { return field.flag != nullptr ? field.flag : field.name; }

// "--dq, --dk, --dv, --dbias and --dsink"
std::string gradient_flags() {
  std::vector<std::string> flags;
  for (const core::TensorField& field : core::kTensorFields) {
    if (field.written == core::Written::kBackward) flags.emplace_back(field.flag);
  }
  return fmt::format("{} and {}", fmt::join(flags.begin(), flags.end() - 1, ", "), flags.back());
}

class Run {
 public:
  explicit Run(const RunOptions& options) : options_(options), heads_first_(options.layout == "bhsd") {
    if (options.layout != "bshd" && !heads_first_) {
      throw WrongUse(fmt::format("--layout: '{}', accepted bshd and bhsd", options.layout));
    }
    check_flags();
    for (const core::TensorField* field : results()) {
      files_.add(options_.file(*field), field->flag, field->name);
    }
    tensors_.program = options.score.program(false);
    for (const std::size_t n : gradients_of_program()) {
      const std::string& name = tensors_.program->names[n];
      files_.add(tensors_.program->files[n], "--dbind " + name, "d_" + name);
    }
    device_ = options.device.device();
    read_inputs();
    if (options.check && core::is_8bit(tensors_["k"].dtype)) {
      throw WrongUse(
          fmt::format("--check: given with {}, accepted with tensors of 16 bits or more", tensors_["k"].describe()));
    }
    make_outputs();
  }

  // Returns 0, or 1 if a check failed.
  int execute() {
    const Interrupts interrupts;
    const CallResult forward = run_attention(tensors_, options_.attention, device_, TESSERA_FORWARD);
    CallResult backward;
    if (is_backward()) backward = run_attention(tensors_, options_.attention, device_, TESSERA_BACKWARD);
    std::vector<OutputCheck> checks;
    if (options_.check) checks = check_outputs(tensors_, options_.attention, device_, is_backward());

    std::FILE* const messages = files_.use_standard_output() ? stderr : stdout;
    for (const core::TensorField* field : results()) {
      files_.set(field->flag, tensors_[*field], stored_shape(*field));
    }
    for (const std::size_t n : gradients_of_program()) {
      const Tensor& gradient = tensors_.program->gradients[n];
      files_.set("--dbind " + tensors_.program->names[n], gradient, tensors_.program->shapes[n]);
    }
    throw_if_interrupted();
    files_.commit();
    bool passed = true;
    for (const OutputCheck& check : checks) passed = passed && check.passed();
    fmt::print(messages, "{}",
               options_.json ? json(forward, backward, checks, passed) : text(forward, backward, checks));
    return passed ? 0 : 1;
  }

 private:
  bool is_backward() const { return !options_.file("d_o").empty(); }

  void check_flags() const {
    bool gradient = false;  // is requested
    for (const core::TensorField& field : core::kTensorFields) {
      const std::string& file = options_.file(field);
      if (file.empty()) continue;
      if (!core::takes_part(field, false) && !is_backward()) {
        throw WrongUse(fmt::format("{} {}: given without --grad, which names the cotangent of o", field.flag, file));
      }
      const core::TensorField* primal = core::primal_of(field);
      if (primal != nullptr && options_.file(*primal).empty()) {
        throw WrongUse(fmt::format("{} {}: given without {}", field.flag, file, primal->flag));
      }
      gradient = gradient || primal != nullptr;
    }
    if (options_.score.has_gradients() && !is_backward()) {
      throw WrongUse("--dbind: given without --grad, which names the cotangent of o");
    }
    gradient = gradient || options_.score.has_gradients();
    if (is_backward() && !gradient) {
      throw WrongUse(fmt::format("--grad {}: no gradient is asked for, accepted with at least one of {}",
                                 options_.file("d_o"), gradient_flags()));
    }
  }

  Tensor floating(FileTensor file) const {
    const bool bfloat16 = !options_.dtype.empty() && parse_input_dtype(options_.dtype) == TESSERA_BFLOAT16;
    return as_floating(std::move(file), bfloat16);
  }

  // One of q, k, v and their cotangents, in the requested layout.
  Tensor sequence(FileTensor file, bool of_cache) const {
    const bool own = of_cache && !options_.dtype_kv.empty();
    const std::string& name = own ? options_.dtype_kv : options_.dtype;
    std::optional<tessera_dtype> dtype;
    if (!name.empty()) dtype = own ? parse_cache_dtype(name) : parse_input_dtype(name);
    Tensor tensor = as_sequence(std::move(file), dtype);
    if (dtype && tensor.dtype != *dtype) {
      throw WrongUse(fmt::format("{}, {} says {}", tensor.describe(), own ? "--dtype-kv" : "--dtype", name));
    }
    if (heads_first_) view_heads_first(tensor);
    return tensor;
  }

  Tensor read(const core::TensorField& field) const {
    FileTensor file = read_tensor_file(options_.file(field), argument_of(field), field.name);
    switch (field.dtypes) {
      case core::Dtypes::kFloating:
      case core::Dtypes::kAsQ:
      case core::Dtypes::kKeys:
      case core::Dtypes::kOutput:
      case core::Dtypes::kAsQOrFloat32:
        return sequence(std::move(file), field.dtypes == core::Dtypes::kKeys);
      case core::Dtypes::kFloat32OrAsQ:
        return floating(std::move(file));
      case core::Dtypes::kFloat32:
        return as_float32(std::move(file));
      case core::Dtypes::kInt32:
        return as_int32(std::move(file));
      case core::Dtypes::kInt64:
        return as_int64(std::move(file));
      case core::Dtypes::kBool:
        return as_bool(std::move(file));
    }
    return {};
  }

  void read_inputs() {
    for (const core::TensorField& field : core::kTensorFields) {
      if (field.written == core::Written::kNever && !options_.file(field).empty()) tensors_[field] = read(field);
    }
  }

  // Tensors that the call needs or the user requests.
  bool is_made(const core::TensorField& field) const {
    if (field.written == core::Written::kNever) return false;
    if (field.need == core::Need::kAlways || (field.need == core::Need::kBackward && is_backward())) return true;
    return !options_.file(field).empty();
  }

  void make_outputs() {
    Extents extents;
    for (const core::TensorName name : {core::TensorName("q"), core::TensorName("k"), core::TensorName("v")}) {
      const Tensor& tensor = tensors_[name];
      const core::TensorField& field = core::kTensorFields[name.index];
      // The library checks the rank and everything else.
      if (tensor.shape.size() < 3 || tensor.shape.size() > 4) {
        throw WrongUse(fmt::format("{}, accepted rank 4, or rank 3 when packed", tensor.describe()));
      }
      extents.bind(tensor.shape.size() == 3 ? field.packed : field.dense, tensor.shape);
    }
    for (const core::TensorField& field : core::kTensorFields) {
      if (!is_made(field)) continue;
      const core::TensorField* primal = core::primal_of(field);
      Shape shape = primal != nullptr
                        ? tensors_[*primal].shape
                        : extents.shape(field, tensors_["q"].shape.size() == 3 ? field.packed : field.dense);
      const bool heads_first = heads_first_ && core::is_sequence(field);
      if (heads_first) std::swap(shape[1], shape[2]);
      Tensor& tensor = tensors_[field];
      tensor = make_tensor(fmt::format("{} {}", field.flag, options_.file(field)), dtype_of(field, tensors_["q"].dtype),
                           shape);
      // Rows of a packed tensor beyond the last sequence belong to none and are not written.
      if (&tensor == &tensors_["lse"]) {
        std::fill_n(tensor.as<float>(), tensor.elems(), -std::numeric_limits<float>::infinity());
      } else {
        std::fill_n(tensor.memory.data(), tensor.memory.size_bytes(), std::byte{0});
      }
      if (heads_first) view_heads_first(tensor);
    }
  }

  // The tensors that are written to files.
  std::vector<const core::TensorField*> results() const {
    std::vector<const core::TensorField*> needed;
    for (const core::TensorField& field : core::kTensorFields) {
      if (field.written != core::Written::kNever && !options_.file(field).empty()) needed.push_back(&field);
    }
    return needed;
  }

  // In the order of memory and of the file.
  Shape stored_shape(const core::TensorField& field) const {
    Shape shape = tensors_[field].shape;
    if (heads_first_ && core::is_sequence(field)) std::swap(shape[1], shape[2]);
    return shape;
  }

  // The numbers of the program's tensors whose gradients are written to files.
  std::vector<std::size_t> gradients_of_program() const {
    std::vector<std::size_t> numbers;
    for (std::size_t n = 0; tensors_.program && n < tensors_.program->gradients.size(); ++n) {
      if (tensors_.program->gradients[n].present()) numbers.push_back(n);
    }
    return numbers;
  }

  static std::string call_text(const char* direction, const CallResult& call) {
    return fmt::format("{:<8} {} kernel, {}, {} thread{}: {:.3g} ms, {:.3g} KiB of workspace\n", direction,
                       call.plan.family, tessera_isa_name(call.plan.device.isa), call.plan.device.threads,
                       call.plan.device.threads == 1 ? "" : "s", call.seconds * 1e3,
                       static_cast<double>(tessera_workspace_bytes(&call.plan)) / 1024);
  }

  std::string text(const CallResult& forward, const CallResult& backward,
                   const std::vector<OutputCheck>& checks) const {
    std::string text = call_text("forward", forward);
    if (is_backward()) text += call_text("backward", backward);
    for (const core::TensorField* field : results()) {
      text += fmt::format("{:<8} {} {} -> {}\n", field->name, tessera_dtype_name(tensors_[*field].dtype),
                          shape_text(stored_shape(*field)), printable(options_.file(*field)));
    }
    for (const std::size_t n : gradients_of_program()) {
      const Tensor& gradient = tensors_.program->gradients[n];
      text += fmt::format("{:<8} {} {} -> {}\n", "d_" + tensors_.program->names[n], tessera_dtype_name(gradient.dtype),
                          shape_text(gradient.shape), printable(tensors_.program->files[n]));
    }
    for (const OutputCheck& check : checks) {
      text += fmt::format("check    {:<6} max error {:.2e} (allowed {:.2e}), RMS {:.2e} (allowed {:.2e}): {}\n",
                          check.name, check.error.max_abs, check.allowed.max_abs, check.error.rms, check.allowed.rms,
                          check.passed() ? "ok" : "TOO LARGE");
    }
    return text;
  }

  static Json call_json(const CallResult& call) {
    return {{"kernel", call.plan.family},
            {"isa", tessera_isa_name(call.plan.device.isa)},
            {"threads", call.plan.device.threads},
            {"seconds", call.seconds},
            {"workspace_bytes", tessera_workspace_bytes(&call.plan)}};
  }

  std::string json(const CallResult& forward, const CallResult& backward, const std::vector<OutputCheck>& checks,
                   bool passed) const {
    Json json = {{"forward", call_json(forward)}};
    if (is_backward()) json["backward"] = call_json(backward);
    json["outputs"] = Json::array();
    for (const core::TensorField* field : results()) {
      json["outputs"].push_back({{"name", field->name},
                                 {"file", options_.file(*field)},
                                 {"dtype", tessera_dtype_name(tensors_[*field].dtype)},
                                 {"shape", stored_shape(*field)}});
    }
    for (const std::size_t n : gradients_of_program()) {
      const Tensor& gradient = tensors_.program->gradients[n];
      json["outputs"].push_back({{"name", "d_" + tensors_.program->names[n]},
                                 {"file", tensors_.program->files[n]},
                                 {"dtype", tessera_dtype_name(gradient.dtype)},
                                 {"shape", gradient.shape}});
    }
    if (options_.check) {
      json["passed"] = passed;
      json["checks"] = Json::array();
      for (const OutputCheck& check : checks) {
        json["checks"].push_back({{"name", check.name},
                                  {"max_error", check.error.max_abs},
                                  {"max_error_allowed", check.allowed.max_abs},
                                  {"rms_error", check.error.rms},
                                  {"rms_error_allowed", check.allowed.rms},
                                  {"passed", check.passed()}});
      }
    }
    return json.dump(2, ' ', true, Json::error_handler_t::replace) + "\n";
  }

  const RunOptions& options_;
  bool heads_first_;
  tessera_device device_{};
  AttentionTensors tensors_;
  OutputTensors files_;
};

constexpr const char* kFooter = R"(Files are .npy, or .safetensors with FILE:NAME (default names: q, k, v, bias, ...).
Every result is complete in its place or not there at all; results that go to one .safetensors file under different
names make up that file. A .npy may come through a pipe (/dev/stdin); with -o /dev/stdout the tensor alone goes there
and messages to standard error.

Examples:
  tessera run q.npy k.npy v.npy -o out.npy --causal
  tessera run model.safetensors:q model.safetensors:k model.safetensors:v -o out.npy --lse lse.npy
  tessera run q.npy k.npy v.npy -o out.safetensors:o --lse out.safetensors:lse
  tessera run q.npy k.npy v.npy -o out.npy --grad dout.npy --dq dq.npy --dk dk.npy --dv dv.npy --check
  tessera run q.npy k.npy v.npy -o out.npy --dtype bfloat16 --window 1024 0 --sink sink.npy
  tessera run q.npy k.npy v.npy -o out.npy --cu-seqlens-q cu.npy --cu-seqlens-k cu.npy --causal
  tessera run q.npy k.npy v.npy -o out.npy --score-mod "s * c + bias[h, i - j + 512]" --bind c=0.5 bias=b.npy)";

}  // namespace

void add_run(CLI::App& program, Outcome& outcome) {
  CLI::App* command = program.add_subcommand("run", "Attention on your own tensors, from .npy and .safetensors files");
  auto options = std::make_shared<RunOptions>();
  RunOptions& o = *options;
  for (const core::TensorField& field : core::kTensorFields) {
    if (core::of_several_calls(field)) continue;
    const bool is_output = &field == &core::kTensorFields[core::TensorName("o").index];
    CLI::Option* option = command->add_option((is_output ? "-o," : "") + std::string(argument_of(field)),
                                              o.files[&field - core::kTensorFields],
                                              fmt::format("{}, {}", field.what, contents_text(field)));
    option->check(kFileName)->type_name("FILE")->required(field.need == core::Need::kAlways);
    if (field.flag != nullptr) option->group(field.written != core::Written::kNever ? "Results" : "Tensors");
  }
  command->add_option("--dtype", o.dtype, "What q, k, v must hold; bfloat16: uint16 files are bfloat16 bits");
  command->add_option(
      "--dtype-kv", o.dtype_kv,
      "What k and v must hold, of an 8-bit cache: float8_e4m3, float8_e5m2 (uint8 files are codes), int8");
  command->add_option("--layout", o.layout, "Order of axes in files: bshd or bhsd")->capture_default_str();
  command->add_flag("--check", o.check, "Compare every result to the float64 oracle; exit 1 if an error is too large");
  command->add_flag("--json", o.json, "Say what was done as JSON");
  o.attention.add_to(*command);
  o.score.add_to(*command);
  o.score.add_gradients_to(*command);
  o.device.add_to(*command);
  command->footer(kFooter);
  command->callback([options, &outcome] { outcome.exit_code = Run(*options).execute(); });
}

}  // namespace tessera::cli
