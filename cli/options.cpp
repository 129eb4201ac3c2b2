#include "options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>

#include "error.hpp"

namespace tessera::cli {
namespace {

constexpr tessera_isa kIsas[] = {TESSERA_ISA_BASELINE, TESSERA_ISA_AVX2, TESSERA_ISA_AVX512, TESSERA_ISA_AVX512_BF16};
constexpr tessera_kernel kKernels[] = {TESSERA_KERNEL_AUTO,      TESSERA_KERNEL_TILED,    TESSERA_KERNEL_DECODE,
                                       TESSERA_KERNEL_REFERENCE, TESSERA_KERNEL_FWD_SM80, TESSERA_KERNEL_FWD_SM90,
                                       TESSERA_KERNEL_BWD_SM80};

// The library's names of options, and the flags that set them.
const ArgumentName kFlags[] = {
    {"scale", "--scale"},
    {"causal", "--causal"},
    {"alignment", "--top-left"},
    {"window_left", "--window"},
    {"window_right", "--window"},
    {"softcap", "--softcap"},
    {"dropout_p", "--dropout"},
    {"dropout_seed", "--seed"},
    {"dropout_offset", "--offset"},
    {"mask_block_q", "--mask-block"},
    {"mask_block_k", "--mask-block"},
    {"threads", "--threads"},
    {"isa", "--isa"},
    {"kernel", "--kernel"},
    {"cu_seqlens_q", "--cu-seqlens-q"},
    {"cu_seqlens_k", "--cu-seqlens-k"},
    {"seqused_k", "--seqused-k"},
    {"page_table", "--page-table"},
    {"bias", "--bias"},
    {"mask", "--mask"},
    {"block_mask", "--block-mask"},
    {"alibi_slopes", "--alibi"},
    {"sink", "--sink"},
    {"d_o", "--grad"},
    {"d_lse", "--dlse"},
    {"d_bias", "--dbias"},
    {"d_sink", "--dsink"},
};

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

template <typename Integer>
std::string check_integer(const std::string& text, const char* accepted) {
  Integer value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole ? "" : fmt::format("'{}', accepted is a whole number {}", text, accepted);
}

}  // namespace

const CLI::Validator kInteger([](std::string& text) { return check_integer<std::int64_t>(text, "of 64 bits"); }, "");
const CLI::Validator kUnsigned([](std::string& text) { return check_integer<std::uint64_t>(text, "0 .. 2^64 - 1"); },
                               "");
const CLI::Validator kFileName(
    [](std::string& text) { return text.empty() ? "'', accepted is the name of a file" : std::string(); }, "");

void DeviceOptions::add_to(CLI::App& command) {
  command
      .add_option("--kernel", kernel,
                  "Which kernel: auto; on the CPU tiled, decode or reference; on a GPU fwd_sm80, fwd_sm90 or bwd_sm80")
      ->capture_default_str();
  command.add_option("--isa", isa, "Instruction set: baseline, avx2, avx512 or avx512_bf16 (default: the best here)");
  command.add_option("--threads", threads, "Threads (default: all cores)")->check(kInteger);
}

void DeviceOptions::add_place_to(CLI::App& command) {
  place.clear();
  command.add_option("--device", place, "cuda or cpu (default: cuda where there is a GPU)");
}

void DeviceOptions::add_arch_to(CLI::App& command) {
  command.add_option("--arch", arch, "A GPU that need not be here, by its architecture: 80, 90, sm_120, ...");
  command.add_option("--multiprocessors", multiprocessors, "How many the GPU of --arch has (default: the usual one's)")
      ->check(kInteger);
}

tessera_device DeviceOptions::described() const {
  if (place == "cpu") throw WrongUse(fmt::format("--arch: {}, accepted without --device or with --device cuda", arch));
  tessera_device device = described_gpu(arch);
  if (multiprocessors) {
    constexpr std::int64_t kMost = 4096;
    if (*multiprocessors < 1 || *multiprocessors > kMost) {
      throw WrongUse(fmt::format("--multiprocessors: {}, accepted 1 .. {}", *multiprocessors, kMost));
    }
    if (*multiprocessors != device.cores) device.name[0] = '\0';  // another GPU than the usual one
    device.cores = static_cast<std::int32_t>(*multiprocessors);
  }
  return device;
}

tessera_device described_gpu(const std::string& arch) {
  std::string digits = arch.starts_with("sm_") ? arch.substr(3) : arch;
  if (digits.ends_with('a')) digits.pop_back();
  std::int32_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const bool whole = error == std::errc() && end == digits.data() + digits.size();
  tessera_device device{};
  const tessera_status status = tessera_device_cuda_arch(whole ? number : 0, &device);
  if (status.code == TESSERA_OK) return device;
  const std::string message = status.message, accepted = message.substr(message.find("accepted"));
  throw WrongUse(fmt::format("--arch: '{}', {}", arch, accepted));
}

tessera_device DeviceOptions::device() const {
  tessera_device device{};
  if (multiprocessors && arch.empty()) {
    throw WrongUse(fmt::format("--multiprocessors: {}, given without --arch", *multiprocessors));
  }
  if (!arch.empty()) {
    device = described();
  } else if (place == "cpu") {
    device = cpu();
  } else if (place.empty() || place == "cuda") {
    const tessera_status status = tessera_device_cuda(0, &device);
    if (place == "cuda" && status.code != TESSERA_OK) throw WrongUse(fmt::format("--device: cuda, {}", status.message));
    if (status.code != TESSERA_OK) device = cpu();
  } else {
    throw WrongUse(fmt::format("--device: '{}', accepted cuda and cpu", place));
  }
  device.kernel = chosen_kernel();
  return device;
}

tessera_kernel DeviceOptions::chosen_kernel() const {
  const auto* found = std::find_if(std::begin(kKernels), std::end(kKernels),
                                   [&](tessera_kernel k) { return kernel == tessera_kernel_name(k); });
  if (found != std::end(kKernels)) return *found;
  std::string accepted;
  for (const tessera_kernel known : kKernels) {
    accepted += (accepted.empty() ? "" : ", ") + std::string(tessera_kernel_name(known));
  }
  throw WrongUse(fmt::format("--kernel: '{}', accepted {}", kernel, accepted));
}

tessera_device DeviceOptions::cpu() const {
  tessera_device device{};
  check_status(tessera_device_cpu(&device));
  if (!isa.empty()) {
    const auto* found =
        std::find_if(std::begin(kIsas), std::end(kIsas), [&](tessera_isa i) { return isa == tessera_isa_name(i); });
    if (found == std::end(kIsas)) {
      throw WrongUse(fmt::format("--isa: '{}', accepted baseline, avx2, avx512 and avx512_bf16", isa));
    }
    if (*found > device.isa_limit) {
      throw WrongUse(fmt::format("--isa: {}, this CPU has at most {}", isa, tessera_isa_name(device.isa_limit)));
    }
    device.isa = *found;
  }
  if (threads) {
    constexpr std::int64_t kMost = 4096;
    if (*threads < 1 || *threads > kMost) {
      throw WrongUse(fmt::format("--threads: {}, accepted 1 .. {}", *threads, kMost));
    }
    device.threads = static_cast<std::int32_t>(*threads);
  }
  return device;
}

void AttentionOptions::add_to(CLI::App& command) {
  const char* group = "Attention";
  command.add_option("--scale", scale, "Factor of the scores (default: 1 / sqrt(D))")->group(group);
  command.add_flag("--causal", causal, "A query sees no key right of the diagonal")->group(group);
  command.add_flag("--top-left", top_left, "The diagonal starts at the first key (default: ends at the last)")
      ->group(group);
  command.add_option("--window", window, "Keys visible left and right of the diagonal, -1 for all")
      ->expected(2)
      ->check(kInteger)
      ->type_name("LEFT RIGHT")
      ->group(group);
  command.add_option("--softcap", softcap, "Scores become c tanh(s / c)")->type_name("C")->group(group);
  command.add_option("--dropout", dropout, "Probability that an entry is dropped, below 1")
      ->type_name("P")
      ->group(group);
  command.add_option("--seed", seed, "Seed of the dropout")->check(kUnsigned)->group(group);
  command.add_option("--offset", offset, "Offset of the dropout's random numbers")->check(kUnsigned)->group(group);
  command.add_option("--mask-block", mask_block, "Queries and keys that an entry of the block mask stands for")
      ->expected(2)
      ->check(kInteger)
      ->type_name("Q K")
      ->group(group);
  command.add_flag("--deterministic", deterministic, "Gradients have the same bits every time")->group(group);
  command.add_flag("--batch-invariant", batch_invariant, "A sequence's bits do not depend on its batch")->group(group);
}

void AttentionOptions::apply(tessera_problem& problem) const {
  problem.has_scale = scale.has_value() ? 1 : 0;
  problem.scale = scale.value_or(0);
  problem.causal = causal ? 1 : 0;
  problem.alignment = top_left ? TESSERA_TOP_LEFT : TESSERA_BOTTOM_RIGHT;
  if (window.size() == 2) {
    problem.window_left = window[0];
    problem.window_right = window[1];
  }
  problem.softcap = softcap;
  problem.dropout_p = dropout;
  problem.dropout_seed = seed;
  problem.dropout_offset = offset;
  if (mask_block.size() == 2) {
    problem.mask_block_q = mask_block[0];
    problem.mask_block_k = mask_block[1];
  }
  problem.deterministic = deterministic ? 1 : 0;
  problem.batch_invariant = batch_invariant ? 1 : 0;
}

tessera_dtype parse_dtype(const std::string& name) {
  struct Row {
    const char *full, *brief;
    tessera_dtype dtype;
  };
  constexpr Row kRows[] = {{"float32", "f32", TESSERA_FLOAT32},
                           {"float16", "f16", TESSERA_FLOAT16},
                           {"bfloat16", "bf16", TESSERA_BFLOAT16},
                           {"float64", "f64", TESSERA_FLOAT64}};
  for (const Row& row : kRows) {
    if (name == row.full || name == row.brief) return row.dtype;
  }
  throw WrongUse(fmt::format("--dtype: '{}', accepted float32, float16, bfloat16 and float64", name));
}

void check_status(const tessera_status& status, const std::vector<ArgumentName>& tensors) {
  if (status.code == TESSERA_OK) return;
  std::string message = one_line(status.message);
  const std::string token = message.substr(0, message.find_first_of(":[ ("));
  const auto named = [&](const ArgumentName& name) { return name.token == token; };
  if (const auto found = std::find_if(tensors.begin(), tensors.end(), named); found != tensors.end()) {
    message += fmt::format(" (given: {})", found->given);
  } else if (const auto* flag = std::find_if(std::begin(kFlags), std::end(kFlags), named); flag != std::end(kFlags)) {
    message = fmt::format("{}: {}", flag->given, message);
  }
  if (status.code == TESSERA_INTERNAL) throw Failure(message);
  throw WrongUse(message);
}

}  // namespace tessera::cli
