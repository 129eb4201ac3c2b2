#include "safetensors.hpp"

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <vector>

#include "error.hpp"
#include "input_file.hpp"

namespace tessera::cli {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kLargestHeader = 100'000'000;  // the format's own limit
constexpr std::size_t kAlignment = 8;                  // of the data in a file

struct TypeName {
  const char* name;
  Element element;
};
constexpr TypeName kTypes[] = {
    {"F16", Element::kFloat16}, {"BF16", Element::kBfloat16}, {"F32", Element::kFloat32},  {"F64", Element::kFloat64},
    {"I32", Element::kInt32},   {"I64", Element::kInt64},     {"BOOL", Element::kBool},    {"U8", Element::kUint8},
    {"I8", Element::kInt8},     {"F8_E4M3", Element::kE4m3},  {"F8_E5M2", Element::kE5m2},
};

// A header's JSON. Discarded if it is not JSON, or if an object repeats a key, since readers disagree about repeated
// keys.
Json parse_header(const std::string& text) {
  std::vector<std::set<std::string>> keys;  // of the open objects
  bool twice = false;
  const auto note = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key) twice = !keys.back().insert(parsed.get<std::string>()).second || twice;
    return true;
  };
  Json header = Json::parse(text, note, false);
  return twice ? Json(Json::value_t::discarded) : header;
}

// Whole numbers of 0 .. 2^63 - 1, written as such. Throws Json::exception or std::out_of_range.
std::vector<std::int64_t> whole_numbers(const Json& array) {
  std::vector<std::int64_t> numbers;
  for (const Json& entry : array.get_ref<const Json::array_t&>()) {
    const bool fits = entry.is_number_unsigned() &&
                      entry.get<std::uint64_t>() <= std::uint64_t{std::numeric_limits<std::int64_t>::max()};
    if (!fits) throw std::out_of_range(entry.dump());
    numbers.push_back(entry.get<std::int64_t>());
  }
  return numbers;
}

std::string names_of(const Json& header) {
  std::vector<std::string> names;
  constexpr std::size_t kMost = 8;
  for (const auto& [name, entry] : header.items()) {
    if (name == kMetadataKey) continue;
    if (names.size() == kMost) {
      names.push_back("...");
      break;
    }
    names.push_back(name);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

FileTensor read_safetensors(const std::string& path, const std::string& name, const std::string& source) {
  const auto refuse = [&](const std::string& why) -> WrongUse {
    return WrongUse(fmt::format("{}: {}, accepted is a .safetensors file", source, why));
  };
  InputFile file(path, source);
  if (!file.size()) {
    throw WrongUse(
        fmt::format("{}: is a pipe, accepted is a .safetensors file on disk, or a .npy through a pipe", source));
  }
  unsigned char length_bytes[8] = {};
  if (!file.read(length_bytes, sizeof length_bytes)) throw refuse("cut off within its header");
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | length_bytes[i];
  if (length > kLargestHeader) throw refuse("its header is garbled");
  if (static_cast<std::int64_t>(length) > *file.size() - file.position()) throw refuse("cut off within its header");
  std::string text(length, '\0');
  if (!file.read(text.data(), static_cast<std::int64_t>(length))) throw refuse("cut off within its header");
  const Json header = parse_header(text);
  if (!header.is_object()) throw refuse("its header is garbled");
  if (!header.contains(name)) {
    throw WrongUse(
        fmt::format("{}: has no tensor '{}', it holds {} (write FILE:NAME)", source, name, names_of(header)));
  }

  FileTensor tensor{.source = source, .element = Element::kFloat32, .shape = {}, .memory = {}};
  std::string type;
  std::vector<std::int64_t> offsets;
  try {
    const Json& entry = header.at(name);
    type = entry.at("dtype").get<std::string>();
    tensor.shape = whole_numbers(entry.at("shape"));
    offsets = whole_numbers(entry.at("data_offsets"));
  } catch (const Json::exception&) {
    throw refuse("its header is garbled");
  } catch (const std::out_of_range& number) {
    throw refuse(
        fmt::format("its header is garbled: {} in a shape or data_offsets, which hold whole numbers", number.what()));
  }
  bool known = false;
  for (const TypeName& row : kTypes) {
    if (type == row.name) {
      tensor.element = row.element;
      known = true;
    }
  }
  if (!known) {
    throw WrongUse(fmt::format(
        "{}: dtype {}, accepted are F16, BF16, F32, F64, F8_E4M3, F8_E5M2, I8, I32, I64, BOOL and U8", source, type));
  }
  const std::int64_t bytes = checked_bytes(tensor.shape, element_bytes(tensor.element), source);
  const std::int64_t data_at = 8 + static_cast<std::int64_t>(length);
  if (offsets.size() != 2 || offsets[1] < offsets[0] || offsets[1] - offsets[0] != bytes) {
    throw refuse(fmt::format("data_offsets [{}] do not fit its shape {} of {}", fmt::join(offsets, ", "),
                             shape_text(tensor.shape), type));
  }
  if (offsets[1] > *file.size() - data_at) {
    throw WrongUse(fmt::format("{}: holds {} bytes of data, tensor '{}' ends at {}: the file is cut off", source,
                               *file.size() - data_at, name, offsets[1]));
  }
  tensor.memory = Memory(bytes, source);
  file.seek(data_at + offsets[0]);
  if (!file.read(tensor.memory.data(), bytes)) throw refuse("cannot be read to its end");
  return tensor;
}

std::string safetensors_header(const std::vector<SafetensorsEntry>& entries) {
  Json table = Json::object();
  std::int64_t end = 0;
  for (const SafetensorsEntry& entry : entries) {
    const char* type = "U16";
    for (const TypeName& row : kTypes) {
      if (row.element == entry.element) type = row.name;
    }
    const std::int64_t begin = end;
    end += checked_bytes(entry.shape, element_bytes(entry.element), entry.name);
    table[entry.name] = {{"dtype", type}, {"shape", entry.shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = table.dump();
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  std::string header;
  for (std::size_t i = 0; i < 8; ++i) header.push_back(static_cast<char>(text.size() >> (8 * i) & 0xff));
  return header + text;
}

}  // namespace tessera::cli
