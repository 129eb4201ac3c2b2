// The table of a comparison: Tessera and its peers, one row for each length and direction. The program's and Python's
// `compare` both use it; it needs only the C++ library.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "table.hpp"

namespace tessera::cli {

struct ComparedSide {
  std::string title, name;    // "standard attention", "standard"
  bool names_kernel = false;  // a column says which of a framework's kernels ran
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
    double peak_gflops = 0;           // 0: no percentages of it
    bool teraflops = false;
    std::optional<int> width;  // of a line; none: unlimited
  };
  explicit ComparisonTable(Settings settings);

  std::string header() const;
  // A line, preceded by a line that names the direction if a new one begins and no column shows it.
  std::string row(const std::string& direction, std::int64_t length, const std::vector<ComparedNumbers>& sides);
  // The text below the table: about the shown columns, then `notes`. queries_alone: at the greatest lengths only the
  // queries' gradient has errors.
  std::string legend(bool queries_alone, const std::string& notes) const;

 private:
  std::string rate(double gflops) const;

  Settings settings_;
  Table table_;
  bool any_error_ = false;
  std::string direction_;
};

}  // namespace tessera::cli
