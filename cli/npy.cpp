#include "npy.hpp"

#include <fmt/format.h>

#include <cctype>
#include <cstring>
#include <set>
#include <string_view>
#include <utility>

#include "error.hpp"
#include "input_file.hpp"

namespace tessera::cli {
namespace {

constexpr std::string_view kMagic("\x93NUMPY", 6);
constexpr std::size_t kLargestHeader = 1 << 20;
constexpr std::size_t kAlignment = 64;  // of the data in a file

struct Descr {
  const char* descr;
  Element element;
};
constexpr Descr kDescrs[] = {
    {"<f2", Element::kFloat16}, {"<f4", Element::kFloat32}, {"<f8", Element::kFloat64}, {"<i4", Element::kInt32},
    {"<i8", Element::kInt64},   {"|b1", Element::kBool},    {"|u1", Element::kUint8},   {"<u2", Element::kUint16},
    {"<V2", Element::kUint16},  // NumPy's code for types without a name, such as bfloat16
    {"|V2", Element::kUint16},  {"|i1", Element::kInt8},    {"<V1", Element::kUint8},  // likewise float8_e4m3fn
    {"<f1", Element::kUint8},  // float8_e5m2, as ml_dtypes names it
};

// The header is a Python literal: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
class Header {
 public:
  Header(std::string_view text, const std::string& source) : rest_(text), source_(source) {
    expect('{');
    std::set<std::string> keys;
    while (!accept('}')) {
      const std::string key = quoted();
      if (!keys.insert(key).second) refuse();  // readers disagree about a repeated key
      expect(':');
      if (key == "descr") {
        descr = quoted();
      } else if (key == "fortran_order") {
        fortran_order = boolean();
      } else if (key == "shape") {
        shape = tuple();
        has_shape_ = true;
      } else {
        refuse();
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    if (descr.empty() || !has_shape_) refuse();
  }

  std::string descr;
  bool fortran_order = false;
  Shape shape;

 private:
  [[noreturn]] void refuse() const {
    throw WrongUse(fmt::format("{}: its .npy header is garbled, accepted is a file written by numpy.save", source_));
  }

  void skip_space() {
    while (!rest_.empty() && std::isspace(static_cast<unsigned char>(rest_.front())) != 0) rest_.remove_prefix(1);
  }

  bool accept(char needed) {
    skip_space();
    if (rest_.empty() || rest_.front() != needed) return false;
    rest_.remove_prefix(1);
    return true;
  }

  void expect(char needed) {
    if (!accept(needed)) refuse();
  }

  std::string quoted() {
    const char quote = accept('\'') ? '\'' : '"';
    if (quote == '"') expect('"');
    const std::size_t end = rest_.find(quote);
    if (end == std::string_view::npos) refuse();
    std::string text(rest_.substr(0, end));
    rest_.remove_prefix(end + 1);
    return text;
  }

  bool boolean() {
    skip_space();
    for (const auto& [word, value] : {std::pair<std::string_view, bool>{"True", true}, {"False", false}}) {
      if (rest_.starts_with(word)) {
        rest_.remove_prefix(word.size());
        return value;
      }
    }
    refuse();
  }

  Shape tuple() {
    Shape extents;
    expect('(');
    while (!accept(')')) {
      extents.push_back(integer());
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
    return extents;
  }

  std::int64_t integer() {
    skip_space();
    std::int64_t value = 0;
    bool any = false;
    while (!rest_.empty() && std::isdigit(static_cast<unsigned char>(rest_.front())) != 0) {
      if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, rest_.front() - '0', &value)) {
        throw WrongUse(fmt::format("{}: an extent of its shape overflows 63 bits", source_));
      }
      rest_.remove_prefix(1);
      any = true;
    }
    if (!any) refuse();
    return value;
  }

  std::string_view rest_;
  const std::string& source_;
  bool has_shape_ = false;
};

// Column-major to row-major.
Memory reordered(const Memory& columns, const Shape& shape, std::int64_t width, const std::string& source) {
  Memory rows(columns.size_bytes(), source);
  Shape index(shape.size(), 0);
  for (std::int64_t at = 0; at < columns.size_bytes() / width; ++at) {
    std::int64_t from = 0;
    for (std::size_t axis = shape.size(); axis-- > 0;) from = from * shape[axis] + index[axis];
    std::memcpy(rows.data() + at * width, columns.data() + from * width, static_cast<std::size_t>(width));
    for (std::size_t axis = shape.size(); axis-- > 0;) {
      if (++index[axis] < shape[axis]) break;
      index[axis] = 0;
    }
  }
  return rows;
}

std::string read_header(InputFile& file, const std::string& source) {
  const auto refuse = [&](const char* why) {
    throw WrongUse(fmt::format("{}: {}, accepted is a file written by numpy.save", source, why));
  };
  char magic[8];
  if (!file.read(magic, sizeof magic)) {
    refuse(file.size() ? "cut off within its header" : "cut off within its header (a pipe can be read once)");
  }
  if (std::string_view(magic, kMagic.size()) != kMagic) refuse("not a .npy file");
  const int version = magic[6];
  if (version < 1 || version > 3) refuse("a .npy file of an unknown version");
  unsigned char length_bytes[4] = {};
  if (!file.read(length_bytes, version == 1 ? 2 : 4)) refuse("cut off within its header");
  const std::size_t length = length_bytes[0] | static_cast<std::size_t>(length_bytes[1]) << 8 |
                             static_cast<std::size_t>(length_bytes[2]) << 16 |
                             static_cast<std::size_t>(length_bytes[3]) << 24;
  if (length > kLargestHeader) refuse("its .npy header is garbled");
  std::string header(length, '\0');
  if (!file.read(header.data(), static_cast<std::int64_t>(length))) refuse("cut off within its header");
  return header;
}

}  // namespace

FileTensor read_npy(const std::string& path, const std::string& source) {
  InputFile file(path, source);
  const std::string text = read_header(file, source);
  Header header(text, source);

  FileTensor tensor{.source = source, .element = Element::kFloat32, .shape = std::move(header.shape), .memory = {}};
  bool known = false;
  for (const Descr& row : kDescrs) {
    if (header.descr == row.descr) {
      tensor.element = row.element;
      known = true;
    }
  }
  if (!known) {
    throw WrongUse(fmt::format("{}: dtype '{}', accepted are little-endian f2, f4, f8, i1, i4, i8, u1, u2 and b1",
                               source, header.descr));
  }
  const std::int64_t bytes = checked_bytes(tensor.shape, element_bytes(tensor.element), source);
  const auto does_not_fit = [&](const std::string& held, const char* what) {
    return WrongUse(fmt::format("{}: holds {} bytes of data, its shape {} of {} takes {}: the file is {}", source, held,
                                shape_text(tensor.shape), element_name(tensor.element), bytes, what));
  };
  if (file.size()) {  // before allocating what the header claims
    const std::int64_t held = *file.size() - file.position();
    if (held != bytes) throw does_not_fit(fmt::format("{}", held), held < bytes ? "cut off" : "too long");
  }
  tensor.memory = Memory(bytes, source);
  if (!file.read(tensor.memory.data(), bytes)) throw does_not_fit("fewer", "cut off");
  if (!file.at_end()) throw does_not_fit("more", "too long");
  if (header.fortran_order) {
    tensor.memory = reordered(tensor.memory, tensor.shape, element_bytes(tensor.element), source);
  }
  return tensor;
}

std::string npy_header(Element element, const Shape& shape) {
  const char* descr = "<u2";  // bfloat16 bits
  for (const Descr& row : kDescrs) {
    if (row.element == element && row.descr[1] != 'V') descr = row.descr;
  }
  std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}", descr,
                                 fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  const std::size_t before = kMagic.size() + 4;  // magic, version, length
  text.append(kAlignment - (before + text.size() + 1) % kAlignment, ' ');
  text.push_back('\n');
  std::string header(kMagic);
  header += {'\x01', '\x00', static_cast<char>(text.size() & 0xff), static_cast<char>(text.size() >> 8)};
  return header + text;
}

}  // namespace tessera::cli
