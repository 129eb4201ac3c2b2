#include "comparison.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cli/comparison_table.hpp"
#include "cli/machine.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tessera::python {
namespace {

using cli::ComparedNumbers;
using cli::ComparisonTable;
using SideTuple = std::tuple<std::string, std::string, bool>;  // as cli::ComparedSide

ComparisonTable::Settings settings_of(const std::vector<SideTuple>& sides, bool teraflops, std::optional<int> width) {
  ComparisonTable::Settings settings;
  for (const auto& [title, name, names_kernel] : sides) settings.sides.push_back({title, name, names_kernel});
  settings.teraflops = teraflops;
  settings.width = width;
  return settings;
}

ComparedNumbers numbers_of(const nb::dict& side) {
  const auto optional = [&](const char* key) { return nb::cast<std::optional<double>>(side[key]); };
  ComparedNumbers numbers;
  numbers.seconds = optional("seconds");
  numbers.gflops = optional("gflops");
  numbers.extra_bytes = optional("extra_bytes");
  numbers.max_error = optional("max_error");
  numbers.rms_error = optional("rms_error");
  numbers.needs_bytes = nb::cast<double>(side["needs_bytes"]);
  numbers.kernel = nb::cast<std::string>(side["kernel"]);
  return numbers;
}

std::string row(ComparisonTable& table, const std::string& direction, int64_t length, const nb::list& sides) {
  std::vector<ComparedNumbers> numbers;
  for (const nb::handle side : sides) numbers.push_back(numbers_of(nb::cast<nb::dict>(side)));
  return table.row(direction, length, numbers);
}

}  // namespace

void add_comparison_table(nb::module_& m) {
  m.def("busy_text", &cli::busy_text, "threads"_a);
  nb::class_<ComparisonTable>(m, "ComparisonTable")
      .def(
          "__init__",
          [](ComparisonTable* self, const std::vector<SideTuple>& sides, bool teraflops, std::optional<int> width) {
            new (self) ComparisonTable(settings_of(sides, teraflops, width));
          },
          "sides"_a, "teraflops"_a, "width"_a.none())
      .def("header", &ComparisonTable::header)
      .def("row", &row, "direction"_a, "length"_a, "sides"_a)
      .def("legend", &ComparisonTable::legend, "queries_alone"_a, "notes"_a);
}

}  // namespace tessera::python
