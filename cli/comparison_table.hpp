// What a comparison shows: Tessera beside others, a row a length and direction. The program's `compare` and Python's both
// draw by it; it needs nothing but the C++ library.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "table.hpp"

namespace tessera::cli {

struct ComparedSide {
  std::string title, name;    // "standard attention", "standard"
  bool names_kernel = false;  // which of a framework's own ways ran is worth a column
};

// One side of a row.
struct ComparedNumbers {
  std::optional<double> seconds, gflops, extra_bytes, max_error, rms_error;  // without seconds it was not run
  double needs_bytes = 0;                                                    // 0: it refused the problem
  std::string kernel;
};

class ComparisonTable {
 public:
  struct Settings {
    std::vector<ComparedSide> sides;  // Tessera first
    double peak_gflops = 0;           // 0: no shares of it
    bool teraflops = false;
    std::optional<int> width;  // of a line, none: as many as it takes
  };
  explicit ComparisonTable(Settings settings);

  std::string header() const;
  // A line, and before it one of the direction where a new one begins and has no column.
  std::string row(const std::string& direction, std::int64_t length, const std::vector<ComparedNumbers>& sides);
  // What stands below the table: about the columns that are shown, then `notes`. queries_alone: at the greatest lengths no other
  // gradient has errors.
  std::string legend(bool queries_alone, const std::string& notes) const;

 private:
  std::string rate(double gflops) const;

  Settings settings_;
  Table table_;
  bool any_error_ = false;
  std::string direction_;
};

}  // namespace tessera::cli
