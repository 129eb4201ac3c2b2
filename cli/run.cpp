// tessera run: attention on the user's own tensors.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "attention_call.hpp"
#include "check.hpp"
#include "commands.hpp"
#include "error.hpp"
#include "files.hpp"
#include "interrupts.hpp"
#include "options.hpp"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

struct RunOptions {
  std::string q, k, v, o, lse;
  std::string cu_seqlens_q, cu_seqlens_k, seqused_k, page_table;
  std::string bias, mask, block_mask, alibi, sink;
  std::string grad, dlse, dq, dk, dv, dbias, dsink;
  std::string dtype, layout = "bshd";
  bool check = false, json = false;
  AttentionOptions attention;
  DeviceOptions device;
};

// A file that a result goes to.
struct Result {
  const std::string& file;
  const char* argument;
  const char* name;  // of the tensor within a .safetensors file
  const Tensor& tensor;
};

class Run {
 public:
  explicit Run(const RunOptions& options) : options_(options), heads_first_(options.layout == "bhsd") {
    if (options.layout != "bshd" && !heads_first_) {
      throw WrongUse(fmt::format("--layout: '{}', accepted bshd and bhsd", options.layout));
    }
    check_flags();
    for (const Result& result : results()) files_.add(result.file, result.argument, result.name);
    device_ = options.device.device();
    read_inputs();
    make_outputs();
  }

  // 0, or 1 when a check failed.
  int execute() {
    const Interrupts interrupts;
    const CallResult forward = run_attention(tensors_, options_.attention, device_, TESSERA_FORWARD);
    CallResult backward;
    if (is_backward()) backward = run_attention(tensors_, options_.attention, device_, TESSERA_BACKWARD);
    std::vector<OutputCheck> checks;
    if (options_.check) checks = check_outputs(tensors_, options_.attention, device_, is_backward());

    std::FILE* const messages = files_.use_standard_output() ? stderr : stdout;
    for (const Result& result : results()) files_.set(result.argument, result.tensor, stored_shape(result.tensor));
    throw_if_interrupted();
    files_.commit();
    bool passed = true;
    for (const OutputCheck& check : checks) passed = passed && check.passed();
    fmt::print(messages, "{}",
               options_.json ? json(forward, backward, checks, passed) : text(forward, backward, checks));
    return passed ? 0 : 1;
  }

 private:
  bool is_backward() const { return !options_.grad.empty(); }

  void check_flags() const {
    const std::pair<const std::string&, const char*> needs_grad[] = {
        {options_.dq, "--dq"},       {options_.dk, "--dk"},       {options_.dv, "--dv"},
        {options_.dbias, "--dbias"}, {options_.dsink, "--dsink"}, {options_.dlse, "--dlse"}};
    for (const auto& [file, flag] : needs_grad) {
      if (!file.empty() && !is_backward()) {
        throw WrongUse(fmt::format("{} {}: given without --grad, which names the cotangent of o", flag, file));
      }
    }
    if (is_backward() && options_.dq.empty() && options_.dk.empty() && options_.dv.empty() && options_.dbias.empty() &&
        options_.dsink.empty()) {
      throw WrongUse(
          fmt::format("--grad {}: no gradient is asked for, accepted with at least one of --dq, --dk, --dv, "
                      "--dbias and --dsink",
                      options_.grad));
    }
    if (!options_.dbias.empty() && options_.bias.empty()) {
      throw WrongUse(fmt::format("--dbias {}: given without --bias", options_.dbias));
    }
    if (!options_.dsink.empty() && options_.sink.empty()) {
      throw WrongUse(fmt::format("--dsink {}: given without --sink", options_.dsink));
    }
  }

  Tensor floating(const std::string& file, const char* argument, const char* name) const {
    const bool bfloat16 = !options_.dtype.empty() && parse_dtype(options_.dtype) == TESSERA_BFLOAT16;
    return as_floating(read_tensor_file(file, argument, name), bfloat16);
  }

  // One of q, k, v and their cotangents, in the layout that was asked for.
  Tensor sequence(const std::string& file, const char* argument, const char* name) const {
    Tensor tensor = floating(file, argument, name);
    if (!options_.dtype.empty() && tensor.dtype != parse_dtype(options_.dtype)) {
      throw WrongUse(fmt::format("{}, --dtype says {}", tensor.describe(), options_.dtype));
    }
    if (heads_first_) view_heads_first(tensor);
    return tensor;
  }

  void read_inputs() {
    AttentionTensors& t = tensors_;
    t.q = sequence(options_.q, "q", "q");
    t.k = sequence(options_.k, "k", "k");
    t.v = sequence(options_.v, "v", "v");
    const auto optional = [](const std::string& file, Tensor& tensor, auto read, const char* argument,
                             const char* name) {
      if (!file.empty()) tensor = read(read_tensor_file(file, argument, name));
    };
    optional(options_.cu_seqlens_q, t.cu_seqlens_q, as_int32, "--cu-seqlens-q", "cu_seqlens_q");
    optional(options_.cu_seqlens_k, t.cu_seqlens_k, as_int32, "--cu-seqlens-k", "cu_seqlens_k");
    optional(options_.seqused_k, t.seqused_k, as_int32, "--seqused-k", "seqused_k");
    optional(options_.page_table, t.page_table, as_int32, "--page-table", "page_table");
    optional(options_.mask, t.mask, as_bool, "--mask", "mask");
    optional(options_.block_mask, t.block_mask, as_bool, "--block-mask", "block_mask");
    optional(options_.alibi, t.alibi_slopes, as_float32, "--alibi", "alibi_slopes");
    optional(options_.sink, t.sink, as_float32, "--sink", "sink");
    optional(options_.dlse, t.d_lse, as_float32, "--dlse", "d_lse");
    if (!options_.bias.empty()) t.bias = floating(options_.bias, "--bias", "bias");
    if (is_backward()) t.d_o = sequence(options_.grad, "--grad", "d_o");
  }

  // Like `like`, with another last extent and memory of its own.
  Tensor result_like(const Tensor& like, const std::string& source, std::int64_t last) const {
    Shape shape = like.shape;
    shape.back() = last;
    if (heads_first_) std::swap(shape[1], shape[2]);
    Tensor tensor = make_tensor(source, like.dtype, shape);
    // Rows of a packed tensor beyond the last sequence belong to none and are written by nobody.
    std::fill_n(tensor.memory.data(), tensor.memory.size_bytes(), std::byte{0});
    if (heads_first_) view_heads_first(tensor);
    return tensor;
  }

  void make_outputs() {
    AttentionTensors& t = tensors_;
    for (const Tensor* tensor : {&t.q, &t.k, &t.v}) {  // rank and all else is the library's to refuse
      if (tensor->shape.size() < 3 || tensor->shape.size() > 4) {
        throw WrongUse(fmt::format("{}, accepted rank 4, or rank 3 when packed", tensor->describe()));
      }
    }
    t.o = result_like(t.q, "--out " + options_.o, t.v.shape.back());
    if (!options_.lse.empty() || is_backward()) {
      const Shape& q = t.q.shape;
      const Shape shape = q.size() == 4 ? Shape{q[0], q[2], q[1]} : Shape{q[1], q[0]};
      t.lse = make_tensor("--lse " + options_.lse, TESSERA_FLOAT32, shape);
      std::fill_n(t.lse.as<float>(), t.lse.elems(), -std::numeric_limits<float>::infinity());
    }
    if (!is_backward()) return;
    t.d_q = result_like(t.q, "--dq " + options_.dq, t.q.shape.back());
    t.d_k = result_like(t.k, "--dk " + options_.dk, t.k.shape.back());
    t.d_v = result_like(t.v, "--dv " + options_.dv, t.v.shape.back());
    if (!options_.dbias.empty()) t.d_bias = make_tensor("--dbias " + options_.dbias, TESSERA_FLOAT32, t.bias.shape);
    if (!options_.dsink.empty()) t.d_sink = make_tensor("--dsink " + options_.dsink, TESSERA_FLOAT32, t.sink.shape);
  }

  std::vector<Result> results() const {
    const Result all[] = {{options_.o, "--out", "o", tensors_.o},
                          {options_.lse, "--lse", "lse", tensors_.lse},
                          {options_.dq, "--dq", "d_q", tensors_.d_q},
                          {options_.dk, "--dk", "d_k", tensors_.d_k},
                          {options_.dv, "--dv", "d_v", tensors_.d_v},
                          {options_.dbias, "--dbias", "d_bias", tensors_.d_bias},
                          {options_.dsink, "--dsink", "d_sink", tensors_.d_sink}};
    std::vector<Result> wanted;
    for (const Result& result : all) {
      if (!result.file.empty()) wanted.push_back(result);
    }
    return wanted;
  }

  // As it lies in memory, and in the file.
  Shape stored_shape(const Tensor& tensor) const {
    Shape shape = tensor.shape;
    const bool sequence = &tensor != &tensors_.lse && &tensor != &tensors_.d_bias && &tensor != &tensors_.d_sink;
    if (heads_first_ && sequence) std::swap(shape[1], shape[2]);
    return shape;
  }

  static std::string call_text(const char* direction, const CallResult& call) {
    return fmt::format("{:<8} {} kernel, {}, {} thread{}: {:.3g} ms, {:.3g} KiB of workspace\n", direction,
                       tessera_kernel_name(call.plan.kernel), tessera_isa_name(call.plan.device.isa),
                       call.plan.device.threads, call.plan.device.threads == 1 ? "" : "s", call.seconds * 1e3,
                       static_cast<double>(tessera_workspace_bytes(&call.plan)) / 1024);
  }

  std::string text(const CallResult& forward, const CallResult& backward,
                   const std::vector<OutputCheck>& checks) const {
    std::string text = call_text("forward", forward);
    if (is_backward()) text += call_text("backward", backward);
    for (const Result& result : results()) {
      text += fmt::format("{:<8} {} {} -> {}\n", result.name, tessera_dtype_name(result.tensor.dtype),
                          shape_text(stored_shape(result.tensor)), printable(result.file));
    }
    for (const OutputCheck& check : checks) {
      text += fmt::format("check    {:<6} max error {:.2e} (allowed {:.2e}), RMS {:.2e} (allowed {:.2e}): {}\n",
                          check.name, check.error.max_abs, check.allowed.max_abs, check.error.rms, check.allowed.rms,
                          check.passed() ? "ok" : "TOO LARGE");
    }
    return text;
  }

  static Json call_json(const CallResult& call) {
    return {{"kernel", tessera_kernel_name(call.plan.kernel)},
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
    for (const Result& result : results()) {
      json["outputs"].push_back({{"name", result.name},
                                 {"file", result.file},
                                 {"dtype", tessera_dtype_name(result.tensor.dtype)},
                                 {"shape", stored_shape(result.tensor)}});
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
Shapes: q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv], out [B, Sq, Hq, Dv], lse [B, Hq, Sq]; packed, with
--cu-seqlens-q and --cu-seqlens-k [B + 1]: q [Tq, Hq, D], k [Tk, Hkv, D]; paged, with --page-table [B, max_pages] and
--seqused-k [B]: k [pages, page_size, Hkv, D]. Every result is complete in its place or not there at all; results that go
to one .safetensors file under different names make up that file. A .npy may come through a pipe (/dev/stdin); with
-o /dev/stdout the tensor alone goes there and messages to standard error.

Examples:
  tessera run q.npy k.npy v.npy -o out.npy --causal
  tessera run model.safetensors:q model.safetensors:k model.safetensors:v -o out.npy --lse lse.npy
  tessera run q.npy k.npy v.npy -o out.safetensors:o --lse out.safetensors:lse
  tessera run q.npy k.npy v.npy -o out.npy --grad dout.npy --dq dq.npy --dk dk.npy --dv dv.npy --check
  tessera run q.npy k.npy v.npy -o out.npy --dtype bfloat16 --window 1024 0 --sink sink.npy
  tessera run q.npy k.npy v.npy -o out.npy --cu-seqlens-q cu.npy --cu-seqlens-k cu.npy --causal)";

}  // namespace

void add_run(CLI::App& program, Outcome& outcome) {
  CLI::App* command = program.add_subcommand("run", "Attention on your own tensors, from .npy and .safetensors files");
  auto options = std::make_shared<RunOptions>();
  RunOptions& o = *options;
  command->add_option("q", o.q, "Queries")->required()->check(kFileName)->type_name("FILE");
  command->add_option("k", o.k, "Keys")->required()->check(kFileName)->type_name("FILE");
  command->add_option("v", o.v, "Values")->required()->check(kFileName)->type_name("FILE");
  const auto file = [&](const char* flag, std::string& value, const char* what, const char* group) {
    return command->add_option(flag, value, what)->check(kFileName)->type_name("FILE")->group(group);
  };
  file("-o,--out", o.o, "Output, [B, Sq, Hq, Dv]", "Results")->required();
  file("--lse", o.lse, "Log-sum-exp of the scores, float32 [B, Hq, Sq]", "Results");
  file("--dq", o.dq, "Gradient of q", "Results");
  file("--dk", o.dk, "Gradient of k", "Results");
  file("--dv", o.dv, "Gradient of v", "Results");
  file("--dbias", o.dbias, "Gradient of the bias, float32", "Results");
  file("--dsink", o.dsink, "Gradient of the sink, float32", "Results");
  file("--grad", o.grad, "Cotangent of the output: asks for gradients", "Tensors");
  file("--dlse", o.dlse, "Cotangent of the log-sum-exp, float32 [B, Hq, Sq]", "Tensors");
  file("--bias", o.bias, "Added to the scores, [B|1, Hq|1, Sq|1, Sk|1] or its last axes", "Tensors");
  file("--mask", o.mask, "Visible keys, bool [B|1, Hq|1, Sq|1, Sk|1] or its last axes", "Tensors");
  file("--block-mask", o.block_mask, "Visible blocks, bool, of --mask-block queries and keys", "Tensors");
  file("--alibi", o.alibi, "ALiBi slopes, [Hq] or [B, Hq]", "Tensors");
  file("--sink", o.sink, "A logit a head that joins the denominator, [Hq]", "Tensors");
  file("--cu-seqlens-q", o.cu_seqlens_q, "Packed queries: where each sequence starts, int32 [B + 1]", "Tensors");
  file("--cu-seqlens-k", o.cu_seqlens_k, "Packed keys: where each sequence starts, int32 [B + 1]", "Tensors");
  file("--seqused-k", o.seqused_k, "Keys used of each sequence, int32 [B]", "Tensors");
  file("--page-table", o.page_table, "Pages of each sequence, int32 [B, max_pages]", "Tensors");
  command->add_option("--dtype", o.dtype, "What q, k, v must hold; bfloat16: uint16 files are bfloat16 bits");
  command->add_option("--layout", o.layout, "Order of axes in files: bshd or bhsd")->capture_default_str();
  command->add_flag("--check", o.check, "Compare every result to the float64 oracle; exit 1 if an error is too large");
  command->add_flag("--json", o.json, "Say what was done as JSON");
  o.attention.add_to(*command);
  o.device.add_to(*command);
  command->footer(kFooter);
  command->callback([options, &outcome] { outcome.exit_code = Run(*options).execute(); });
}

}  // namespace tessera::cli
