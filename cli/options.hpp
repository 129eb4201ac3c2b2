// The options of attention that are not tensors, as command-line flags of all subcommands.
#pragma once

#include <CLI/CLI.hpp>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/fields.hpp"
#include "tessera/tessera.h"

namespace tessera::cli {

// The kernel, the instruction set and the number of threads.
struct DeviceOptions {
  std::string kernel = "auto";
  std::string place = "cpu";  // or "cuda"; "": a GPU if present
  std::string isa;
  std::optional<std::int64_t> threads;
  std::string arch;  // if not "": a described GPU of this architecture
  std::optional<std::int64_t> multiprocessors;

  void add_to(CLI::App& command);
  // Adds the flags, with a GPU as the default.
  void add_place_to(CLI::App& command);
  // Adds flags that describe a GPU that need not exist, for planning only.
  void add_arch_to(CLI::App& command);
  // This machine's CPU or a GPU, or a described one, with the flags applied. Throws WrongUse.
  tessera_device device() const;

 private:
  tessera_device cpu() const;
  tessera_device described() const;
  void set_family(tessera_device& device) const;
};

// The given options, by their rows of core/fields.hpp.
class AttentionOptions {
 public:
  void add_to(CLI::App& command);
  // Adds only the options with these flags.
  void add_to(CLI::App& command, std::initializer_list<std::string_view> flags);
  // Sets the given options and leaves the others.
  void apply(tessera_problem& problem) const;

 private:
  struct Value {  // one of these, by the option's kind
    bool flag = false;
    std::optional<double> number;
    std::optional<std::uint64_t> unsigned_integer;
    std::vector<std::int64_t> integers;  // one, or two of a pair
  };
  void add_to(CLI::App& command, const core::OptionField& field, Value& value);

  std::array<Value, std::size(core::kOptionFields)> values_;
};

// Checks of a flag's text: a whole number of 64 bits, signed or not.
extern const CLI::Validator kInteger;
extern const CLI::Validator kUnsigned;
// Checks that it is not empty.
extern const CLI::Validator kFileName;

// The typical GPU of an architecture: "90", "90a" or "sm_90a". Throws WrongUse naming --arch.
tessera_device described_gpu(const std::string& arch);

// "float32" -> TESSERA_FLOAT32. Throws WrongUse naming --dtype. Also accepts f32, f16, bf16, f64.
tessera_dtype parse_dtype(const std::string& name);
// The same with float8_e4m3 and float8_e5m2 (e4m3, e5m2).
tessera_dtype parse_input_dtype(const std::string& name);
// Of an 8-bit cache. Throws WrongUse naming --dtype-kv.
tessera_dtype parse_cache_dtype(const std::string& name);

// The user's name of a library argument: "window_left" is "--window".
struct ArgumentName {
  std::string token;
  std::string given;
};

// Throws for a status: WrongUse for a wrong argument or a combination that no kernel supports, Failure otherwise. Adds
// the user's name of the argument that the message begins with.
void check_status(const tessera_status& status, const std::vector<ArgumentName>& tensors = {});

}  // namespace tessera::cli
