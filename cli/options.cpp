#include "options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "core/isa.hpp"
#include "error.hpp"
#include "tessera/plan.hpp"

namespace tessera::cli {
namespace {

constexpr tessera_isa kIsas[] = {TESSERA_ISA_BASELINE, TESSERA_ISA_AVX2, TESSERA_ISA_AVX512,   TESSERA_ISA_AVX512_BF16,
                                 TESSERA_ISA_AMX_BF16, TESSERA_ISA_NEON, TESSERA_ISA_NEON_BF16};

// "auto; on the CPU reference, decode, tiled; on a GPU fwd_sm80, ..."
std::string kernels_text() {
  struct Place {
    std::string text;
    std::string names;
  };
  Place places[] = {{"on the CPU", ""}, {"on a GPU", ""}, {"anywhere", ""}, {"for comparison", ""}};
  for (const tessera_family& family : tessera::families()) {
    const int place = family.for_comparison ? 3 : family.on_cpu && family.on_cuda ? 2 : family.on_cuda ? 1 : 0;
    places[place].names += (places[place].names.empty() ? " " : ", ") + std::string(family.name);
  }
  std::string text = "auto";
  for (const Place& place : places) text += fmt::format("; {}{}", place.text, place.names);
  return text;
}

// The flag of the library's option of that name; "" if none.
std::string_view flag_of(std::string_view token) {
  for (const core::OptionField& field : core::kOptionFields) {
    for (const core::OptionMember& member : field.members) {
      if (member.name != nullptr && member.name == token) return field.flag;
    }
  }
  for (const core::TensorField& field : core::kTensorFields) {
    const bool given = core::is_option(field) || field.written == core::Written::kNever;
    if (field.name == token && given && field.flag != nullptr) return field.flag;
  }
  constexpr std::pair<std::string_view, std::string_view> kOfDevice[] = {
      {"threads", "--threads"}, {"isa", "--isa"}, {"kernel", "--kernel"}};
  for (const auto& [name, flag] : kOfDevice) {
    if (name == token) return flag;
  }
  return "";
}

void set_member(tessera_problem& problem, const core::OptionMember& member, std::int64_t value) {
  if (member.flag != nullptr) {
    problem.*member.flag = static_cast<std::int32_t>(value);
  } else {
    problem.*member.integer = value;
  }
}

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
  command.add_option("--kernel", kernel, "Which kernel: " + kernels_text())->capture_default_str();
  command.add_option(
      "--isa", isa,
      "Instruction set: baseline, avx2, avx512, avx512_bf16, amx_bf16, neon or neon_bf16 (default: the best here)");
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
    if (*multiprocessors != device.cores) device.name[0] = '\0';  // no longer the typical GPU
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
  set_family(device);
  return device;
}

void DeviceOptions::set_family(tessera_device& device) const {
  if (kernel == "auto") return;
  std::string accepted = "auto";
  for (const tessera_family& family : tessera::families()) {
    if (kernel == family.name) {
      std::memcpy(device.family, family.name, sizeof device.family);
      return;
    }
    accepted += ", " + std::string(family.name);
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
      throw WrongUse(
          fmt::format("--isa: '{}', accepted baseline, avx2, avx512, avx512_bf16, amx_bf16, neon and neon_bf16", isa));
    }
    if (!core::has_isa(device.isa_limit, *found)) {
      throw WrongUse(fmt::format("--isa: {}, this CPU has at most {}", isa, tessera_isa_name(device.isa_limit)));
    }
    device.isa = *found;
    device.vector_isa = 0;
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
  for (std::size_t i = 0; i < values_.size(); ++i) add_to(command, core::kOptionFields[i], values_[i]);
}

void AttentionOptions::add_to(CLI::App& command, std::initializer_list<std::string_view> flags) {
  for (std::size_t i = 0; i < values_.size(); ++i) {
    const core::OptionField& field = core::kOptionFields[i];
    if (std::ranges::find(flags, field.flag) != flags.end()) add_to(command, field, values_[i]);
  }
}

void AttentionOptions::add_to(CLI::App& command, const core::OptionField& field, Value& value) {
  CLI::Option* option = nullptr;
  switch (field.kind) {
    case core::OptionKind::kFlag:
    case core::OptionKind::kAlignment:
      option = command.add_flag(field.flag, value.flag, field.what);
      break;
    case core::OptionKind::kNumber:
    case core::OptionKind::kOptionalNumber:
      option = command.add_option(field.flag, value.number, field.what);
      break;
    case core::OptionKind::kUnsigned:
      option = command.add_option(field.flag, value.unsigned_integer, field.what)->check(kUnsigned);
      break;
    case core::OptionKind::kInteger:
    case core::OptionKind::kPair:
      option = command.add_option(field.flag, value.integers, field.what)
                   ->expected(field.kind == core::OptionKind::kPair ? 2 : 1)
                   ->check(kInteger);
      break;
  }
  if (field.value_name != nullptr) option->type_name(field.value_name);
  option->group("Attention");
}

void AttentionOptions::apply(tessera_problem& problem) const {
  for (std::size_t i = 0; i < values_.size(); ++i) {
    const Value& value = values_[i];
    const auto& members = core::kOptionFields[i].members;
    if (value.flag) set_member(problem, members[0], 1);
    if (value.number) problem.*members[0].number = *value.number;
    if (value.number && core::kOptionFields[i].kind == core::OptionKind::kOptionalNumber) problem.has_scale = 1;
    if (value.unsigned_integer) problem.*members[0].unsigned_integer = *value.unsigned_integer;
    for (std::size_t m = 0; m < value.integers.size(); ++m) set_member(problem, members[m], value.integers[m]);
  }
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
  } else if (const std::string_view flag = flag_of(token); !flag.empty()) {
    message = fmt::format("{}: {}", flag, message);
  }
  if (status.code == TESSERA_INTERNAL) throw Failure(message);
  throw WrongUse(message);
}

}  // namespace tessera::cli
