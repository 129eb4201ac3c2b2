// A table for the terminal whose rows can be printed as they come: widths are fixed, groups of columns have a title.
#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

struct Column {
  std::string title;
  int width;  // characters
};

struct ColumnGroup {
  std::string title;
  std::vector<Column> columns;
};

class Table {
 public:
  explicit Table(std::vector<ColumnGroup> groups) : groups_(std::move(groups)) {}

  std::string header() const;  // titles and a line below, with the closing newline
  // A text a column, right-aligned, in groups; a group of several columns given one text shows it across all of them.
  std::string row(const std::vector<std::vector<std::string>>& cells) const;

 private:
  std::vector<ColumnGroup> groups_;
};

}  // namespace tessera::cli
