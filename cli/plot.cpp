#include "plot.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "error.hpp"
#include "files.hpp"

namespace tessera::cli {
namespace {

constexpr const char* kTesseraColour = "#0b6e99";
constexpr const char* kStandardColour = "#d9730d";
constexpr double kBytesPerMib = 1024.0 * 1024.0;

bool on_path(const std::string& program) {
  const char* path = std::getenv("PATH");
  std::string folders = path != nullptr ? path : "";
  for (std::size_t from = 0; from <= folders.size();) {
    const std::size_t end = std::min(folders.find(':', from), folders.size());
    if (access((folders.substr(from, end - from) + "/" + program).c_str(), X_OK) == 0) return true;
    from = end + 1;
  }
  return false;
}

// Within a gnuplot string in single quotes.
std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("''") : std::string(1, c);
  return result + "'";
}

// A data block: length, Tessera's and standard attention's value, what the latter needs, and that where it was not run.
// NaN: none.
std::string data_block(const std::string& name, const std::vector<Cell>& cells, tessera_direction direction,
                       bool memory) {
  std::string block = fmt::format("${} << EOD\n", name);
  for (const Cell& cell : cells) {
    if (cell.settings.direction != direction) continue;
    const auto value = [&](const Side& side) {
      return memory ? static_cast<double>(side.extra_bytes) / kBytesPerMib : side.seconds * 1e3;
    };
    const std::string standard = cell.standard ? fmt::format("{}", value(*cell.standard)) : "NaN";
    const std::string needed =
        memory ? fmt::format("{}", static_cast<double>(cell.standard_needs_bytes) / kBytesPerMib) : "NaN";
    block += fmt::format("{} {} {} {} {}\n", cell.settings.shape.seqlen_q, value(cell.tessera), standard, needed,
                         cell.standard ? "NaN" : needed);
  }
  return block + "EOD\n";
}

// Of the machine or the GPU.
struct RoomLine {
  std::int64_t bytes;
  std::string whose;
};

// Where standard attention was run, and where not.
struct StandardRuns {
  bool some, not_all;
};

std::string panel(const std::string& block, const std::string& title, const std::string& unit, bool memory,
                  const StandardRuns& standard, const RoomLine& room) {
  std::string curves;
  if (standard.some) {
    curves = fmt::format(
        "${} using 1:3 with linespoints linewidth 2.5 pointtype 5 pointsize 0.9 linecolor rgb '{}' title 'standard "
        "attention', ",
        block, kStandardColour);
  }
  curves += fmt::format(
      "${} using 1:2 with linespoints linewidth 2.5 pointtype 7 pointsize 1 linecolor rgb '{}' title 'Tessera'", block,
      kTesseraColour);
  std::string plot = fmt::format("set title {}\nset ylabel {}\n", quoted(title), quoted(unit));
  if (!memory) return plot + "set yrange [*:*]\nplot " + curves + "\n";
  const double machine_mib = static_cast<double>(room.bytes) / kBytesPerMib;
  constexpr double kRoomForKey = 50;  // above the line of the machine's memory, on a logarithmic axis
  plot += fmt::format("set yrange [*:{}]\nplot {}, ", machine_mib * kRoomForKey, curves);
  plot += fmt::format("${} using 1:4 with lines linewidth 1.5 dashtype 2 linecolor rgb '{}' notitle, ", block,
                      kStandardColour);
  if (standard.not_all) {
    plot += fmt::format(
        "${} using 1:5 with points pointtype 4 pointsize 1.1 linewidth 1.5 linecolor rgb '{}' title 'standard "
        "attention, not run', ",
        block, kStandardColour);
  }
  return plot + fmt::format("{} with lines linewidth 1 dashtype 3 linecolor rgb '#666666' title 'memory of {}'\n",
                            machine_mib, room.whose);
}

std::string script(const std::string& output, bool svg, const std::vector<Cell>& cells, const std::string& title,
                   const RoomLine& room) {
  const auto has = [&](tessera_direction direction) {
    return std::any_of(cells.begin(), cells.end(), [&](const Cell& c) { return c.settings.direction == direction; });
  };
  std::vector<std::pair<tessera_direction, std::string>> directions;
  if (has(TESSERA_FORWARD)) directions.emplace_back(TESSERA_FORWARD, "forward");
  if (has(TESSERA_BACKWARD)) directions.emplace_back(TESSERA_BACKWARD, "backward");
  const std::size_t rows = directions.size();

  std::string text =
      fmt::format("set terminal {} size {},{} {} enhanced font 'DejaVu Sans,11' background rgb 'white'\n",
                  svg ? "svg" : "pngcairo", 1200, 60 + 440 * rows, svg ? "" : "fontscale 1.0");
  text += fmt::format("set output {}\n", quoted(output));
  for (const auto& [direction, name] : directions) {
    text += data_block("time_" + name, cells, direction, false) + data_block("memory_" + name, cells, direction, true);
  }
  text +=
      fmt::format("set multiplot layout {},2 title {} noenhanced font ',12' margins 0.07,0.98,{},{} spacing 0.09,{}\n",
                  rows, quoted(title), rows == 2 ? 0.07 : 0.13, rows == 2 ? 0.90 : 0.82, rows == 2 ? 0.13 : 0.1);
  text +=
      "set logscale x 2\nset logscale y 10\nset grid linecolor rgb '#dddddd'\nset border linecolor rgb '#555555'\n"
      "set key top left reverse Left\nset xlabel 'sequence length'\nset format x '%.0f'\nset format y '%g'\n"
      "set offsets graph 0.03, graph 0.03, graph 0.08, 0\nset datafile missing 'NaN'\n";
  for (const auto& [direction, name] : directions) {
    StandardRuns standard{false, false};
    for (const Cell& cell : cells) {
      if (cell.settings.direction == direction) (cell.standard ? standard.some : standard.not_all) = true;
    }
    text += panel("time_" + name, "Time, " + name, "milliseconds", false, standard, room);
    text += panel("memory_" + name, "Memory beyond inputs and outputs, " + name, "MiB", true, standard, room);
  }
  return text + "unset multiplot\nunset output\n";
}

}  // namespace

void check_plot(const std::string& file) {
  if (!file.ends_with(".png") && !file.ends_with(".svg")) {
    throw WrongUse(fmt::format("--plot: '{}', accepted is a file that ends in .png or .svg", file));
  }
  OutputFiles::check(file, "--plot");
  if (!on_path("gnuplot")) throw WrongUse("--plot: needs the program gnuplot (Debian: gnuplot-nox), which is not here");
}

void draw_plot(const std::string& file, const std::vector<Cell>& cells, const std::string& title,
               std::int64_t memory_bytes, const std::string& whose) {
  const std::string partial = fmt::format("{}.{}.partial", file, getpid());
  const auto remove = [](const std::string* path) { unlink(path->c_str()); };
  const std::unique_ptr<const std::string, decltype(remove)> cleanup(&partial, remove);
  std::FILE* gnuplot = popen("gnuplot -", "w");
  if (gnuplot == nullptr) throw Failure(fmt::format("--plot {}: gnuplot cannot be started", file));
  const std::string text = script(partial, file.ends_with(".svg"), cells, title, {memory_bytes, whose});
  const bool written = std::fwrite(text.data(), 1, text.size(), gnuplot) == text.size();
  if (pclose(gnuplot) != 0 || !written || std::rename(partial.c_str(), file.c_str()) != 0) {
    throw Failure(fmt::format("--plot {}: gnuplot could not draw it", file));
  }
}

}  // namespace tessera::cli
