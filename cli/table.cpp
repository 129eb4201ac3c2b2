#include "table.hpp"

#include <algorithm>

namespace tessera::cli {
namespace {

constexpr const char* kBar = " │";
constexpr const char* kRule = "─";
constexpr const char* kCross = "┼";

// Characters shown: bytes of UTF-8 that do not continue one.
int shown_width(const std::string& text) {
  return static_cast<int>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

std::string padding(const std::string& text, int width) {
  return std::string(static_cast<std::size_t>(std::max(0, width - shown_width(text))), ' ');
}

// Each column stands one space from what is left of it.
int width_of(const ColumnGroup& group) {
  int width = 0;
  for (const Column& column : group.columns) width += column.width + 1;
  return width;
}

}  // namespace

std::string Table::header() const {
  std::string titles, columns, rule;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const ColumnGroup& group = groups_[g];
    const bool last = g + 1 == groups_.size();
    const std::string title = " " + group.title;
    titles += title + (last ? "" : padding(title, width_of(group)) + kBar);
    for (const Column& column : group.columns) columns += " " + padding(column.title, column.width) + column.title;
    columns += last ? "" : kBar;
    for (int i = 0; i < width_of(group) + (last ? 0 : 1); ++i) rule += kRule;
    rule += last ? "" : kCross;
  }
  return titles + "\n" + columns + "\n" + rule + "\n";
}

std::string Table::row(const std::vector<std::vector<std::string>>& cells) const {
  std::string line;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const ColumnGroup& group = groups_[g];
    if (cells[g].size() == 1 && group.columns.size() > 1) {
      const std::string text = " " + cells[g].front();
      line += text + padding(text, width_of(group));
    } else {
      for (std::size_t c = 0; c < group.columns.size(); ++c) {
        line += " " + padding(cells[g][c], group.columns[c].width) + cells[g][c];
      }
    }
    line += g + 1 == groups_.size() ? "\n" : kBar;
  }
  return line;
}

}  // namespace tessera::cli
