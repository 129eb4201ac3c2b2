#include "table.hpp"

#include <algorithm>
#include <utility>

#include "terminal.hpp"

namespace tessera::cli {
namespace {

constexpr const char* kBar = " │";
constexpr const char* kRule = "─";
constexpr const char* kCross = "┼";
constexpr int kBarWidth = 2;

std::string padding(const std::string& text, int width) {
  return std::string(static_cast<std::size_t>(std::max(0, width - shown_width(text))), ' ');
}

}  // namespace

Table::Table(std::vector<ColumnGroup> groups, int width) : groups_(std::move(groups)) {
  int rank = 0;  // the greatest shown
  for (const ColumnGroup& group : groups_) {
    shown_.emplace_back(group.columns.size(), true);
    for (const Column& column : group.columns) rank = std::max(rank, column.rank);
  }
  for (; this->width() > width && rank > 0; --rank) {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      for (std::size_t c = 0; c < shown_[g].size(); ++c) shown_[g][c] = groups_[g].columns[c].rank < rank;
    }
  }
  if (this->width() <= width) return;
  for (ColumnGroup& group : groups_) {
    if (!group.brief.empty()) group.title = group.brief;
  }
}

bool Table::shows(std::size_t group) const {
  return std::find(shown_[group].begin(), shown_[group].end(), true) != shown_[group].end();
}

bool Table::shows_all() const {
  return std::all_of(shown_.begin(), shown_.end(), [](const std::vector<bool>& columns) {
    return std::find(columns.begin(), columns.end(), false) == columns.end();
  });
}

// Each column is one space right of its neighbour.
int Table::width(std::size_t group) const {
  if (!shows(group)) return 0;
  int width = 0;
  for (std::size_t c = 0; c < shown_[group].size(); ++c) {
    if (shown_[group][c]) width += groups_[group].columns[c].width + 1;
  }
  return std::max(width, shown_width(groups_[group].title) + 1);
}

int Table::width() const {
  int total = -kBarWidth;  // between groups
  for (std::size_t g = 0; g < groups_.size(); ++g) total += shows(g) ? width(g) + kBarWidth : 0;
  return total;
}

// Right-aligned, in all of the group's width.
std::string Table::columns(std::size_t group, const std::vector<std::string>& texts) const {
  std::string line;
  for (std::size_t c = 0; c < shown_[group].size(); ++c) {
    if (shown_[group][c]) line += " " + padding(texts[c], groups_[group].columns[c].width) + texts[c];
  }
  return padding(line, width(group)) + line;
}

std::string Table::header() const {
  std::string titles, names, rule;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (!shows(g)) continue;
    const bool first = rule.empty();
    const std::string title = " " + groups_[g].title;
    std::vector<std::string> texts;
    for (const Column& column : groups_[g].columns) texts.push_back(column.title);
    titles += (first ? "" : kBar) + title + padding(title, width(g));
    names += (first ? "" : kBar) + columns(g, texts);
    if (!first) rule += std::string(kRule) + kCross;
    for (int i = 0; i < width(g); ++i) rule += kRule;
  }
  titles.erase(titles.find_last_not_of(' ') + 1);
  return titles + "\n" + names + "\n" + rule + "\n";
}

std::string Table::row(const std::vector<std::vector<std::string>>& cells) const {
  std::string line;
  bool first = true;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (!shows(g)) continue;
    if (!std::exchange(first, false)) line += kBar;
    if (cells[g].size() == 1 && groups_[g].columns.size() > 1) {
      const std::string text = " " + cells[g].front();
      line += text + padding(text, width(g));
    } else {
      line += columns(g, cells[g]);
    }
  }
  return line + "\n";
}

}  // namespace tessera::cli
