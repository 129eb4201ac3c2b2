#include "comparison_table.hpp"

#include <utility>

#include "terminal.hpp"
#include "units.hpp"

namespace tessera::cli {
namespace {

// In a narrow terminal columns with the greatest rank are left out first.
enum Rank { kStays, kExtra, kExtraOfOthers, kDirection, kPeak, kMaxError, kRate, kRmsError, kKernel };
// Groups of columns, and the first one's columns. After kSides a group a side, then speed-ups and errors.
enum { kWhich, kSides };
enum { kDirectionColumn };
constexpr int kPeakColumn = 2;  // of Tessera's group
constexpr int kAnyWidth = 1000;
constexpr const char* kNotRun = "not run";

std::vector<ColumnGroup> groups_of(const ComparisonTable::Settings& settings) {
  std::vector<ColumnGroup> groups = {{"", {{"", 8, kDirection}, {"length", 7}}}};
  ColumnGroup speed_up{"speed-up", {}}, max_error{"max error against float64", {}}, rms_error{"RMS error", {}};
  const auto& sides = settings.sides;
  for (std::size_t s = 0; s < sides.size(); ++s) {
    std::vector<Column> columns = {{"ms", 7}, {settings.teraflops ? "TFLOP/s" : "GFLOP/s", 7, kRate}};
    if (s == 0 && settings.peak_gflops > 0) columns.push_back({"peak", 6, kPeak});
    columns.push_back({"extra", 8, s == 0 ? kExtra : kExtraOfOthers});
    if (sides[s].names_kernel) columns.push_back({"by", 9, kKernel});
    groups.push_back({sides[s].title, columns, sides[s].name});
    if (s > 0) speed_up.columns.push_back({sides.size() > 2 ? sides[s].name : "", 8});
    max_error.columns.push_back({sides[s].name, 12, kMaxError});
    rms_error.columns.push_back({sides[s].name, 8, kRmsError});
  }
  groups.insert(groups.end(), {speed_up, max_error, rms_error});
  return groups;
}

std::string error_text(std::optional<double> error) { return error ? text_of("%.1e", *error) : ""; }

}  // namespace

ComparisonTable::ComparisonTable(Settings settings)
    : settings_(std::move(settings)), table_(groups_of(settings_), settings_.width.value_or(kAnyWidth)) {}

std::string ComparisonTable::header() const { return table_.header(); }

std::string ComparisonTable::rate(double gflops) const {
  return number_text(settings_.teraflops ? gflops / 1e3 : gflops);
}

std::string ComparisonTable::row(const std::string& direction, std::int64_t length,
                                 const std::vector<ComparedNumbers>& sides) {
  std::vector<std::vector<std::string>> cells = {{direction, std::to_string(length)}};
  std::vector<std::string> speed_ups, max_errors, rms_errors;
  for (std::size_t s = 0; s < sides.size(); ++s) {
    const ComparedNumbers& side = sides[s];
    if (side.seconds) {
      std::vector<std::string> texts = {number_text(*side.seconds * 1e3), rate(side.gflops.value_or(0))};
      if (s == 0 && settings_.peak_gflops > 0) {
        texts.push_back(text_of("%.0f %%", side.gflops.value_or(0) / settings_.peak_gflops * 100));
      }
      texts.push_back(side.extra_bytes ? bytes_text(*side.extra_bytes) : "");
      if (settings_.sides[s].names_kernel) texts.push_back(side.kernel);
      cells.push_back(texts);
    } else {
      const std::string needs = side.needs_bytes > 0 ? "needs " + bytes_text(side.needs_bytes) : "refused";
      const auto has_room = [&](const std::string& text) { return shown_width(text) < table_.width(cells.size()); };
      cells.push_back({has_room(needs + ": " + kNotRun) ? needs + ": " + kNotRun : has_room(needs) ? needs : kNotRun});
    }
    const bool both = side.seconds && sides[0].seconds;
    if (s > 0) speed_ups.push_back(both ? text_of("%.2f ×", *side.seconds / *sides[0].seconds) : "");
    max_errors.push_back(error_text(side.max_error));
    rms_errors.push_back(error_text(side.rms_error));
    any_error_ = any_error_ || side.max_error;
  }
  cells.insert(cells.end(), {speed_ups, max_errors, rms_errors});
  const bool headed = std::exchange(direction_, direction) != direction && !table_.shows(kWhich, kDirectionColumn);
  return (headed ? " " + direction + "\n" : "") + table_.row(cells);
}

std::string ComparisonTable::legend(bool queries_alone, const std::string& notes) const {
  const std::size_t max_error_group = kSides + settings_.sides.size() + 1;
  std::string text;
  if (table_.shows(kSides, settings_.peak_gflops > 0 ? kPeakColumn + 1 : kPeakColumn)) {
    text += " extra: memory beyond inputs and outputs.";
  }
  if (settings_.peak_gflops > 0 && table_.shows(kSides, kPeakColumn)) text += " peak: share of the measured peak.";
  if (any_error_ && table_.shows(max_error_group, 0)) {
    text += " Errors: of sampled rows of the output (forward) or of the gradients (backward).";
    if (queries_alone) text += " At the greatest lengths the gradient of the queries alone is held against float64.";
  }
  if (!notes.empty()) text += " " + notes;
  if (!table_.shows_all()) text += " A wider terminal shows more columns, --json all numbers.";
  return text.empty() ? text : wrapped(text.substr(1), table_.width());
}

}  // namespace tessera::cli
