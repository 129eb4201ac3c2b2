// A table for the terminal whose rows can be printed as they come: widths are fixed, groups of columns have a title.
// Columns that have no room are left out.
#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

struct Column {
  std::string title;
  int width;     // characters
  int rank = 0;  // what is left out first where there is no room: the greatest; 0 stays
};

struct ColumnGroup {
  std::string title;
  std::vector<Column> columns;
  std::string brief = {};  // in the title's place where the columns that stay are still too wide
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
  // A text a column, right-aligned, in groups; a group of several columns given one text shows it across all of them.
  std::string row(const std::vector<std::vector<std::string>>& cells) const;

 private:
  bool shows(std::size_t group) const;
  std::string columns(std::size_t group, const std::vector<std::string>& texts) const;

  std::vector<ColumnGroup> groups_;
  std::vector<std::vector<bool>> shown_;
};

}  // namespace tessera::cli
