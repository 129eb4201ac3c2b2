#include "plot.hpp"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "error.hpp"
#include "output_file.hpp"

namespace tessera::cli {
namespace {

constexpr const char* kTesseraColour = "#0b6e99";
constexpr const char* kStandardColour = "#d9730d";

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

// The parts of a title between dots, as many on a line as there is room for: 'one'."\n".'two'.
std::string title_lines(const std::string& title) {
  constexpr std::size_t kMostBytes = 120;
  const std::string dot = " · ";
  std::vector<std::string> lines;
  for (std::size_t from = 0; from <= title.size();) {
    const std::size_t end = std::min(title.find(dot, from), title.size());
    const std::string part = title.substr(from, end - from);
    const bool fits = !lines.empty() && lines.back().size() + dot.size() + part.size() <= kMostBytes;
    if (fits) {
      lines.back() += dot + part;
    } else {
      lines.push_back(part);
    }
    from = end + dot.size();
  }
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : ".\"\\n\".") + quoted(line);
  return text;
}

// ---- axes: logarithmic, with a label at each mark, between bounds that hold for a single point, too -------------------

struct Axis {
  double low = 0, high = 0;
  std::vector<std::pair<double, std::string>> marks;

  std::string commands(char letter) const {
    std::string text;
    for (const auto& [value, label] : marks)
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", quoted(label), value);
    return fmt::format("set {0}range [{1}:{2}]\nset {0}tics ({3})\n", letter, low, high, text);
  }
};

std::string seconds_text(double seconds) {
  if (seconds < 0.9999e-3) return fmt::format("{:g} µs", std::round(seconds * 1e9) * 1e-3);
  return seconds < 0.9999 ? fmt::format("{:g} ms", std::round(seconds * 1e6) * 1e-3) : fmt::format("{:g} s", seconds);
}

// Whole decades; marked at each, or at 1, 2 and 5 where these are few.
Axis time_axis(double least, double most) {
  constexpr double kMargin = 1.25;
  const double low = std::floor(std::log10(least / kMargin)), high = std::ceil(std::log10(most * kMargin));
  Axis axis{.low = std::pow(10, low), .high = std::pow(10, high), .marks = {}};
  for (double decade = low; decade <= high; ++decade) {
    for (const double step : {1, 2, 5}) {
      const double value = step * std::pow(10, decade);
      if ((step > 1 && high - low > 2) || value > axis.high) continue;
      axis.marks.emplace_back(value, seconds_text(value));
    }
  }
  return axis;
}

// Marked at powers of 32: 32 KiB, 1 MiB, 32 MiB.
Axis bytes_axis(double least, double most) {
  constexpr double kRoomForKey = 0.35;  // of the axis up to `most`, above it
  constexpr int kStep = 5;
  const int low = static_cast<int>(std::floor(std::log2(std::max(least, 1.0)))) / kStep * kStep;
  Axis axis{.low = std::exp2(low), .high = most * std::pow(most / std::exp2(low), kRoomForKey), .marks = {}};
  for (int power = low; std::exp2(power) <= axis.high; power += kStep) {
    static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    axis.marks.emplace_back(std::exp2(power), fmt::format("{} {}", 1 << power % 10, kUnits[power / 10]));
  }
  return axis;
}

Axis length_axis(const std::vector<const Cell*>& cells) {
  constexpr double kMargin = 1.4, kLeastRatio = 1.3;  // of neighbours whose marks do not touch
  Axis axis;
  for (const Cell* cell : cells) {
    const auto length = static_cast<double>(cell->settings.shape.seqlen_q);
    if (axis.marks.empty() || length > axis.marks.back().first * kLeastRatio) {
      axis.marks.emplace_back(length, fmt::format("{:.0f}", length));
    }
    axis.high = length * kMargin;
  }
  axis.low = axis.marks.front().first / kMargin;
  return axis;
}

// ---- what is drawn ----------------------------------------------------------------------------------------------------

// The cells of one direction, by length.
std::vector<const Cell*> cells_of(const std::vector<Cell>& cells, tessera_direction direction) {
  std::vector<const Cell*> chosen;
  for (const Cell& cell : cells) {
    if (cell.settings.direction == direction) chosen.push_back(&cell);
  }
  std::stable_sort(chosen.begin(), chosen.end(), [](const Cell* a, const Cell* b) {
    return a->settings.shape.seqlen_q < b->settings.shape.seqlen_q;
  });
  return chosen;
}

// A data block: length, Tessera's and standard attention's value, what the latter needs, and that where it was not run.
// NaN: none.
std::string data_block(const std::string& name, const std::vector<const Cell*>& cells, bool memory) {
  std::string block = fmt::format("${} << EOD\n", name);
  for (const Cell* cell : cells) {
    const auto value = [&](const Side& side) { return memory ? static_cast<double>(side.extra_bytes) : side.seconds; };
    const std::string standard = cell->standard ? fmt::format("{}", value(*cell->standard)) : "NaN";
    const std::string needed = memory ? fmt::format("{}", cell->standard_needs_bytes) : "NaN";
    block += fmt::format("{} {} {} {} {}\n", cell->settings.shape.seqlen_q, value(cell->tessera), standard, needed,
                         cell->standard ? "NaN" : needed);
  }
  return block + "EOD\n";
}

// Of the machine or the GPU.
struct RoomLine {
  std::int64_t bytes;
  std::string whose;
};

std::string curve(const std::string& block, int column, const char* style, const char* colour,
                  const std::string& title) {
  return fmt::format("${} using 1:{} with {} linecolor rgb '{}' {}", block, column, style, colour,
                     title.empty() ? "notitle" : "title " + quoted(title));
}

// Time and memory over length, in one direction.
std::string panels(const std::string& name, const std::vector<const Cell*>& cells, const RoomLine& room) {
  double least_seconds = std::numeric_limits<double>::infinity(), most_seconds = 0;
  double least_bytes = static_cast<double>(room.bytes), most_bytes = least_bytes;
  bool some = false, all = true;
  for (const Cell* cell : cells) {
    some = some || cell->standard;
    all = all && cell->standard;
    for (const Side* side : {&cell->tessera, cell->standard ? &*cell->standard : nullptr}) {
      if (!side) continue;
      least_seconds = std::min(least_seconds, side->seconds);
      most_seconds = std::max(most_seconds, side->seconds);
      least_bytes = std::min(least_bytes, static_cast<double>(side->extra_bytes));
    }
    most_bytes = std::max(most_bytes, static_cast<double>(cell->standard_needs_bytes));
  }
  const char* const squares = "linespoints linewidth 2.5 pointtype 5 pointsize 0.9";
  const char* const circles = "linespoints linewidth 2.5 pointtype 7 pointsize 1";
  const auto measured = [&](const std::string& block) {
    const std::string standard = some ? curve(block, 3, squares, kStandardColour, "standard attention") + ", " : "";
    return standard + curve(block, 2, circles, kTesseraColour, "Tessera");
  };
  std::string text = length_axis(cells).commands('x');
  text += fmt::format("set title {}\n{}set logscale y 10\n", quoted("Time, " + name),
                      time_axis(least_seconds, most_seconds).commands('y'));
  text += "plot " + measured("time_" + name) + "\n";
  const std::string memory = "memory_" + name;
  text += fmt::format("set title {}\n{}set logscale y 2\n", quoted("Memory beyond inputs and outputs, " + name),
                      bytes_axis(least_bytes, most_bytes).commands('y'));
  text += fmt::format("plot {}, {}", measured(memory),
                      curve(memory, 4, "lines linewidth 1.5 dashtype 2", kStandardColour, ""));
  if (!all) {
    text += ", " + curve(memory, 5, "points pointtype 4 pointsize 1.1 linewidth 1.5", kStandardColour,
                         "standard attention, not run");
  }
  return text + fmt::format(", {} with lines linewidth 1 dashtype 3 linecolor rgb '#666666' title {}\n", room.bytes,
                            quoted("memory of " + room.whose));
}

std::string script(bool svg, const std::vector<Cell>& cells, const std::string& title, const RoomLine& room) {
  std::vector<std::pair<std::string, std::vector<const Cell*>>> directions;
  for (const auto& [direction, name] : {std::pair(TESSERA_FORWARD, "forward"), {TESSERA_BACKWARD, "backward"}}) {
    std::vector<const Cell*> chosen = cells_of(cells, direction);
    if (!chosen.empty()) directions.emplace_back(name, std::move(chosen));
  }
  const std::size_t rows = directions.size();
  std::string text =
      fmt::format("set terminal {} size {},{} {} enhanced font 'DejaVu Sans,11' background rgb 'white'\n",
                  svg ? "svg" : "pngcairo", 1200, 80 + 440 * rows, svg ? "" : "fontscale 1.0");
  for (const auto& [name, chosen] : directions) {
    text += data_block("time_" + name, chosen, false) + data_block("memory_" + name, chosen, true);
  }
  text +=
      fmt::format("set multiplot layout {},2 title {} noenhanced font ',12' margins 0.08,0.98,{},{} spacing 0.1,{}\n",
                  rows, title_lines(title), rows == 2 ? 0.07 : 0.13, rows == 2 ? 0.88 : 0.79, rows == 2 ? 0.13 : 0.1);
  text +=
      "set logscale x 2\nset grid xtics ytics back linetype 1 linecolor rgb '#dddddd'\nset border linecolor rgb "
      "'#555555'\n"
      "set key top left reverse Left\nset xlabel 'sequence length'\nset datafile missing 'NaN'\n";
  for (const auto& [name, chosen] : directions) text += panels(name, chosen, room);
  return text + "unset multiplot\n";
}

// Runs a program found on PATH with these descriptors as its standard ones. Whether it ended well.
bool run_program(const char* const (&arguments)[4], int input, int output, int errors) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  const int given[] = {input, output, errors};
  for (int standard = 0; standard < 3; ++standard) {
    posix_spawn_file_actions_adddup2(&actions, given[standard], standard);
  }
  pid_t child = 0;
  const int error = posix_spawnp(&child, arguments[0], &actions, nullptr, const_cast<char* const*>(arguments), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return false;
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return false;
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// A file for another program, which is gone when it is closed.
struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using TemporaryFile = std::unique_ptr<std::FILE, Close>;

std::string first_line(std::FILE* file) {
  std::rewind(file);
  char line[200] = {};
  while (std::fgets(line, sizeof line, file) != nullptr) {
    const std::string text(line, std::strcspn(line, "\n"));
    if (text.find_first_not_of(' ') != std::string::npos) return text;
  }
  return "it says nothing";
}

}  // namespace

void check_plot(const std::string& file) {
  if (!file.ends_with(".png") && !file.ends_with(".svg")) {
    throw WrongUse(fmt::format("--plot: '{}', accepted is a file that ends in .png or .svg", file));
  }
  const OutputFile can_be_written(file, "--plot " + file);
  if (!on_path("gnuplot")) throw WrongUse("--plot: needs the program gnuplot (Debian: gnuplot-nox), which is not here");
}

void draw_plot(const std::string& file, const std::vector<Cell>& cells, const std::string& title,
               std::int64_t memory_bytes, const std::string& whose) {
  OutputFile output(file, "--plot " + file);
  output.open();
  const TemporaryFile commands(std::tmpfile()), complaints(std::tmpfile());
  const std::string text = script(file.ends_with(".svg"), cells, title, {memory_bytes, whose});
  if (!commands || !complaints || std::fwrite(text.data(), 1, text.size(), commands.get()) != text.size()) {
    throw Failure(fmt::format("--plot {}: no temporary file for gnuplot: {}", file, std::strerror(errno)));
  }
  std::rewind(commands.get());
  constexpr const char* const kGnuplot[] = {"gnuplot", "--default-settings", "-", nullptr};
  if (!run_program(kGnuplot, fileno(commands.get()), output.descriptor(), fileno(complaints.get()))) {
    throw Failure(fmt::format("--plot {}: gnuplot could not draw it: {}", file, first_line(complaints.get())));
  }
  output.commit();
}

}  // namespace tessera::cli
