// The picture of `tessera compare`: time and extra memory over length, Tessera and standard attention, by gnuplot.
#pragma once

#include <string>
#include <vector>

#include "compare_cell.hpp"

namespace tessera::cli {

// Refuses, before anything is measured, a file that is neither .png nor .svg or cannot be written, and a machine
// without gnuplot. Throws WrongUse.
void check_plot(const std::string& file);

// Throws Failure. `title` stands above the picture; a line shows the memory of `whose`: "this machine".
void draw_plot(const std::string& file, const std::vector<Cell>& cells, const std::string& title,
               std::int64_t memory_bytes, const std::string& whose);

}  // namespace tessera::cli
