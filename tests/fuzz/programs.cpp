// tessera_program_fuzz: draws texts of score programs until the count or the time is used up, or one is wrong:
// any bytes are refused with a column, or read; what is read has a canonical text that reads back as the same program;
// the gradient of a drawn program is the slope of its score.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <random>
#include <string>

#include "core/score/definitions.hpp"
#include "core/score/drawn.hpp"
#include "core/score/parse.hpp"
#include "core/score/print.hpp"
#include "core/score/slopes.hpp"

namespace {

namespace score = tessera::core::score;
using tessera::testing::World;

// "": as it must be.
std::string read_back(const std::string& text, const std::string& mask, const std::vector<score::Name>& names,
                      score::Program& program) {
  const tessera_status status = score::parse(text, mask, names, program);
  if (status.code != TESSERA_OK) {
    const std::string message = status.message;
    const bool is_located = message.starts_with("score") || message.starts_with("mask");
    return is_located ? "" : "the refusal does not name its text: " + message;
  }
  const std::string again = program.score < 0 ? "" : to_text(program, program.score);
  const std::string mask_again = program.mask < 0 ? "" : to_text(program, program.mask);
  score::Program copy;
  const tessera_status of_copy = score::parse(again, mask_again, names, copy);
  if (of_copy.code != TESSERA_OK) return "its canonical text is refused: " + std::string(of_copy.message);
  return key(copy) == key(program) ? "" : "its canonical text is another program: " + again + " | " + mask_again;
}

std::string check(uint64_t seed, uint64_t index, std::string& text, std::string& mask) {
  std::mt19937_64 random(seed * 0x9E3779B97F4A7C15u + index);
  World world(index + 1);
  const std::vector<score::Name> names = world.names();
  score::Program program;
  const int depth = 1 + static_cast<int>(random() % 4);
  mask.clear();
  switch (index % 3) {
    case 0:
      text = tessera::testing::bytes(random);
      return read_back(text, "", names, program);
    case 1:
      text = tessera::testing::expression(score::Type::kFloat, depth, random);
      mask = tessera::testing::expression(score::Type::kBool, depth, random);
      return read_back(text, mask, names, program);
    default:
      text = tessera::testing::smooth_expression(depth, random);
      std::string wrong = read_back(text, "", names, program);
      if (wrong.empty() && program.score >= 0) wrong = wrong_gradient(world, program, random, 3);
      return wrong;
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Random texts of score programs.", "tessera_program_fuzz");
  uint64_t seed = std::random_device{}(), count = 0;
  double seconds = 0;
  app.add_option("--seed", seed, "Of the texts; random unless given");
  app.add_option("--count", count, "Stop after this many texts; 0 = no end");
  app.add_option("--seconds", seconds, "Stop after this time; 0 = no end")->check(CLI::NonNegativeNumber);
  CLI11_PARSE(app, argc, argv);
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const auto is_over = [&] {
    return seconds > 0 && std::chrono::duration<double>(Clock::now() - start).count() >= seconds;
  };
  uint64_t index = 0;
  for (; (count == 0 || index < count) && !is_over(); ++index) {
    std::string text, mask;
    const std::string wrong = check(seed, index, text, mask);
    if (wrong.empty()) continue;
    std::printf("FAILED, text %llu: %s\nscore: %s\nmask: %s\n", static_cast<unsigned long long>(index), wrong.c_str(),
                text.c_str(), mask.c_str());
    return 1;
  }
  std::printf("%llu texts passed\n", static_cast<unsigned long long>(index));
  return 0;
}
