// A table for the terminal whose rows can be printed one by one: widths are fixed, groups of columns have a title.
// Columns that do not fit are left out.
#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

struct Column {
  std::string title;
  int width;     // characters
  int rank = 0;  // the greatest rank is left out first; 0 always stays
};

struct ColumnGroup {
  std::string title;
  std::vector<Column> columns;
  std::string brief = {};  // instead of the title if the remaining columns are still too wide
};

class Table {
 public:
  // For lines of at most `width` characters.
  Table(std::vector<ColumnGroup> groups, int width);

  bool shows(std::size_t group, std::size_t column) const { return shown_[group][column]; }
  bool shows_all() const;
  int width() const;
  int width(std::size_t group) const;  // characters between two bars

  std::string header() const;  // titles and a line below, with the closing newline
  // One text for each column, right-aligned, in groups; a group of several columns with a single text shows it across
  // all of them.
  std::string row(const std::vector<std::vector<std::string>>& cells) const;

 private:
  bool shows(std::size_t group) const;
  std::string columns(std::size_t group, const std::vector<std::string>& texts) const;

  std::vector<ColumnGroup> groups_;
  std::vector<std::vector<bool>> shown_;
};

}  // namespace tessera::cli
