// Prints a family's tile table as JSON, for the scripts that search and document tiles (tessera_tiles).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace tessera::cuda {

// A JSON value; texts are identifiers, which need no escapes.
struct JsonValue {
  std::string text;
  JsonValue(int64_t value) : text(std::to_string(value)) {}
  JsonValue(int value) : text(std::to_string(value)) {}
  JsonValue(bool value) : text(value ? "true" : "false") {}
  JsonValue(const char* value) : text("\"" + std::string(value) + "\"") {}
  static JsonValue raw(std::string json) {
    JsonValue value(0);
    value.text = std::move(json);
    return value;
  }
};

struct JsonField {
  std::string_view name;
  JsonValue value;
};

inline std::string json_object(std::initializer_list<JsonField> fields) {
  std::string text;
  for (const JsonField& field : fields) {
    text.append(text.empty() ? "{\"" : ", \"").append(field.name).append("\": ").append(field.value.text);
  }
  return text + "}";
}

// [ each(row), ... ], one row per line.
template <class Rows, class Each>
std::string json_array(const Rows& rows, Each&& each) {
  std::string text;
  for (const auto& row : rows) text.append(text.empty() ? "[\n  " : ",\n  ").append(each(row));
  return text.empty() ? "[]" : text + "\n ]";
}

}  // namespace tessera::cuda
