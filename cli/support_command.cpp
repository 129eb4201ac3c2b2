// tessera support: which options each back end supports.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "support.hpp"

namespace tessera::cli {

void add_support(CLI::App& program, Outcome& outcome) {
  struct Options {
    bool json = false, markdown = false;
  };
  CLI::App* command = program.add_subcommand("support", "Which options each back end supports, in which dtypes");
  auto options = std::make_shared<Options>();
  CLI::Option* as_json =
      command->add_flag("--json", options->json, "Every answer as JSON, refusals with their reasons");
  command->add_flag("--markdown", options->markdown, "As a page: the kernels by dtype, and what is refused")
      ->excludes(as_json);
  command->footer("Examples:\n  tessera support\n  tessera support --json");
  command->callback([options, &outcome] {
    if (options->json) {
      fmt::print("{}\n", nlohmann::ordered_json::parse(support_json()).dump(2));
    } else {
      fmt::print("{}", options->markdown ? support_markdown() : support_text());
    }
    outcome.exit_code = 0;
  });
}

}  // namespace tessera::cli
