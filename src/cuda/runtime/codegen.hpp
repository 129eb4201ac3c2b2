// The source of one kernel: a few lines that name a template and its config.
#pragma once

#include <array>
#include <cassert>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "tessera/types.hpp"

namespace tessera::cuda {

// Upper limits for a kernel on any architecture, for the compiler of the prebuilt kernels' rows (prebuilt.hpp).
struct Limits {
  int32_t registers = 0;  // per thread; 0: given by its family's row
  int32_t spill_bytes = 0, stack_bytes = 0;
};

// One kernel: its source, and what a launch needs to know.
struct KernelSpec {
  const char* name = "";    // "fwd_sm80": the template's name, and the symbol's after "tessera_"
  const char* header = "";  // "tessera/fwd_sm80/kernel.cuh"
  const char* params = "";  // "FwdSm80Params"
  std::string config;       // the template's argument, from config_text()
  int32_t threads = 0, min_blocks_per_sm = 1;
  int32_t cluster = 1;     // blocks of a cluster; grid.x of a launch is a multiple
  int64_t smem_bytes = 0;  // dynamic
  // The kernel itself waits for its predecessor in the stream (ptx/synchronization.cuh), so it may start before that
  // has ended.
  bool begins_early = false;
  Limits limits{};  // of a kernel that is the same for all problems
  // Compiled with the kernel, which then gets ProgrammedParams of its params, of `program_params_bytes`. "": none.
  std::string program{};
  int64_t program_params_bytes = 0;
  std::string claim;  // what host and device must agree on, checked by static_assert: "tessera::kCombineWarps == 4"
};

std::string symbol_of(const KernelSpec& spec);
std::string source_of(const KernelSpec& spec);

// ---- a config's fields (TESSERA_CONFIG_FIELDS) as text and as numbers -----------------------------------------------

// A config's fields as numbers, without padding: the key under which a kernel is found.
struct ConfigValues {
  std::array<int32_t, 40> value{};
  int32_t count = 0;
};

namespace detail {

// "a, b" -> "a", then "b".
inline std::string_view next_name(std::string_view& names) {
  const size_t comma = names.find(',');
  const std::string_view name = names.substr(0, comma);
  names.remove_prefix(comma == std::string_view::npos ? names.size() : names.find_first_not_of(' ', comma + 1));
  return name;
}

}  // namespace detail

// "tessera::FwdSm80Config{.dtype = tessera::Dtype{1}, .head_dim = 64, ...}"
template <class Config>
std::string config_text(const Config& config) {
  std::string text;
  const auto literal = [](const auto& value) -> std::string {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, bool>) {
      return value ? "true" : "false";
    } else if constexpr (std::is_same_v<Value, int>) {
      return std::to_string(value);
    } else if constexpr (std::is_enum_v<Value>) {
      return std::string("tessera::") + enum_name(value) + "{" + std::to_string(static_cast<int>(value)) + "}";
    } else {
      return config_text(value);
    }
  };
  visit_fields(config, [&](std::string_view names, const auto&... field) {
    const auto add = [&](const std::string& value) {
      text.append(text.empty() ? "." : ", .").append(detail::next_name(names)).append(" = ").append(value);
    };
    (add(literal(field)), ...);
  });
  return std::string("tessera::") + type_name(config) + "{" + text + "}";
}

template <class Config>
void append_values(ConfigValues& values, const Config& config) {
  const auto append = [&values](const auto& value) {
    if constexpr (std::is_class_v<std::decay_t<decltype(value)>>) {
      append_values(values, value);
    } else {
      assert(values.count < static_cast<int32_t>(values.value.size()));
      values.value[static_cast<size_t>(values.count++)] = static_cast<int32_t>(value);
    }
  };
  visit_fields(config, [&append](const char*, const auto&... field) { (append(field), ...); });
}
// Of a score program: a kernel with another one is another kernel.
inline void append_values(ConfigValues& values, uint64_t hash) {
  for (const uint64_t half : {hash, hash >> 32}) {
    assert(values.count < static_cast<int32_t>(values.value.size()));
    values.value[static_cast<size_t>(values.count++)] = static_cast<int32_t>(static_cast<uint32_t>(half));
  }
}
template <class Config>
ConfigValues config_values(const Config& config) {
  ConfigValues values;
  append_values(values, config);
  return values;
}

// The names of a config's fields, in order.
template <class Config>
std::vector<std::string> config_fields(const Config& config) {
  std::vector<std::string> fields;
  visit_fields(config, [&fields](std::string_view names, const auto&...) {
    while (!names.empty()) fields.emplace_back(detail::next_name(names));
  });
  return fields;
}

}  // namespace tessera::cuda
