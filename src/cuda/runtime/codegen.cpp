#include "cuda/runtime/codegen.hpp"

#include <cassert>
#include <string_view>

namespace tessera::cuda {
namespace {

// visit("a, b", config.a, config.b). A field that a config has and this list has not, or the other way round, does not
// compile.
#define TESSERA_CONFIG_FIELDS(Config, ...)                 \
  template <class Visit>                                   \
  void visit_fields(const Config& config, Visit&& visit) { \
    const auto& [__VA_ARGS__] = config;                    \
    visit(#__VA_ARGS__, __VA_ARGS__);                      \
  }                                                        \
  constexpr const char* type_name(const Config&) { return #Config; }

TESSERA_CONFIG_FIELDS(ScoreConfig, softcap, bias, bias_dtype, alibi, mask, block_mask, dropout, scale_first,
                      causal_seqs, tree_mask)
TESSERA_CONFIG_FIELDS(FwdConfig, dtype, head_dim, head_dim_v, block_m, block_n, warps, stages, min_blocks_per_sm,
                      aligned, paged, pack_gqa, split, row_map, bulk, score)
TESSERA_CONFIG_FIELDS(FwdSm90Config, dtype, head_dim, head_dim_v, block_n, consumers, k_stages, v_stages, q_stages,
                      o_chunks, page_rows, causal, cluster, varlen, score)
TESSERA_CONFIG_FIELDS(BwdConfig, dtype, head_dim, head_dim_v, block_m, block_n, warps, s_dp_split, column_parts, stages,
                      min_blocks_per_sm, aligned, bulk_dq, d_bias, deterministic, score)
TESSERA_CONFIG_FIELDS(BwdSm90Config, dtype, head_dim, block_m, block_n, stages, ds_stages, window, varlen,
                      deterministic, alternate, staged_dq, d_bias, score)
TESSERA_CONFIG_FIELDS(BwdSm90D256Config, dtype, half_slots, exchange_stages, window)
TESSERA_CONFIG_FIELDS(BwdSm90RowsConfig, dtype, head_dim, block_m, d_sink, d_bias)
TESSERA_CONFIG_FIELDS(DecodeSm90Config, dtype, head_dim, block_n, warps, stages, paged, varlen, invariant, bulk, score)
TESSERA_CONFIG_FIELDS(CombineConfig, dtype, part_dtype)
TESSERA_CONFIG_FIELDS(AppendConfig, dtype)
TESSERA_CONFIG_FIELDS(BwdRowsConfig, dtype, head_dim, head_dim_v, block_m, store_keys, aligned, d_bias, d_sink)
TESSERA_CONFIG_FIELDS(StandardProductConfig, dtype, transpose_a, transpose_b, block_n, stages, aligned, probabilities,
                      mask, dropout)
TESSERA_CONFIG_FIELDS(StandardRowsConfig, dtype, threads, vectors, gradient, mask, dropout)
#undef TESSERA_CONFIG_FIELDS

// What a field's value is in C++.
std::string literal(bool value) { return value ? "true" : "false"; }
std::string literal(int value) { return std::to_string(value); }
std::string literal(Dtype value) { return "tessera::Dtype{" + std::to_string(static_cast<int>(value)) + "}"; }
std::string literal(RowMap value) { return "tessera::RowMap{" + std::to_string(static_cast<int>(value)) + "}"; }
std::string literal(const ScoreConfig& value) { return config_text(value); }

// "a, b" -> "a", then "b".
std::string_view next_name(std::string_view& names) {
  const size_t comma = names.find(',');
  const std::string_view name = names.substr(0, comma);
  names.remove_prefix(comma == std::string_view::npos ? names.size() : names.find_first_not_of(' ', comma + 1));
  return name;
}

void append(ConfigValues& values, int value) {
  assert(values.count < static_cast<int32_t>(values.value.size()));
  values.value[static_cast<size_t>(values.count++)] = value;
}
void append(ConfigValues& values, Dtype value) { append(values, static_cast<int>(value)); }
void append(ConfigValues& values, RowMap value) { append(values, static_cast<int>(value)); }
void append(ConfigValues& values, const ScoreConfig& value) {
  visit_fields(value, [&values](const char*, const auto&... field) { (append(values, field), ...); });
}

}  // namespace

template <class Config>
std::string config_text(const Config& config) {
  std::string text;
  visit_fields(config, [&text](std::string_view names, const auto&... field) {
    const auto add = [&](const std::string& value) {
      text.append(text.empty() ? "." : ", .").append(next_name(names)).append(" = ").append(value);
    };
    (add(literal(field)), ...);
  });
  return std::string("tessera::") + type_name(config) + "{" + text + "}";
}

template <class Config>
ConfigValues config_values(const Config& config) {
  ConfigValues values;
  visit_fields(config, [&values](const char*, const auto&... field) { (append(values, field), ...); });
  return values;
}

template <class Config>
std::vector<std::string> config_fields(const Config& config) {
  std::vector<std::string> fields;
  visit_fields(config, [&fields](std::string_view names, const auto&...) {
    while (!names.empty()) fields.emplace_back(next_name(names));
  });
  return fields;
}

template std::vector<std::string> config_fields(const FwdSm90Config&);
template std::string config_text(const ScoreConfig&);
template std::string config_text(const FwdConfig&);
template std::string config_text(const FwdSm90Config&);
template std::string config_text(const BwdConfig&);
template std::string config_text(const BwdSm90Config&);
template std::string config_text(const BwdSm90D256Config&);
template std::string config_text(const BwdSm90RowsConfig&);
template std::string config_text(const DecodeSm90Config&);
template std::string config_text(const CombineConfig&);
template std::string config_text(const AppendConfig&);
template std::string config_text(const BwdRowsConfig&);
template std::string config_text(const StandardProductConfig&);
template std::string config_text(const StandardRowsConfig&);
template ConfigValues config_values(const FwdConfig&);
template ConfigValues config_values(const FwdSm90Config&);
template ConfigValues config_values(const BwdConfig&);
template ConfigValues config_values(const BwdSm90Config&);
template ConfigValues config_values(const BwdSm90D256Config&);
template ConfigValues config_values(const BwdSm90RowsConfig&);
template ConfigValues config_values(const DecodeSm90Config&);
template ConfigValues config_values(const CombineConfig&);
template ConfigValues config_values(const AppendConfig&);
template ConfigValues config_values(const BwdRowsConfig&);
template ConfigValues config_values(const StandardProductConfig&);
template ConfigValues config_values(const StandardRowsConfig&);

std::string symbol_of(const KernelSpec& spec) { return std::string("tessera_") + spec.name; }

std::string source_of(const KernelSpec& spec) {
  const std::string name = spec.name, params = std::string("tessera::") + spec.params;
  const std::string bounds = std::to_string(spec.threads) + ", " + std::to_string(spec.min_blocks_per_sm);
  const std::string cluster = spec.cluster > 1 ? " __cluster_dims__(" + std::to_string(spec.cluster) + ", 1, 1)" : "";
  return std::string("#include \"") + spec.header + "\"\n\nstatic_assert(" + spec.claim +
         ", \"as the host launches it\");\n\nextern \"C\" __global__ void __launch_bounds__(" + bounds + ")" + cluster +
         "\n" + symbol_of(spec) + "(const __grid_constant__ " + params + " p) {\n  tessera::" + name + "<" +
         spec.config + ">(p);\n}\n";
}

}  // namespace tessera::cuda
