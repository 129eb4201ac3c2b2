// Results of calls: functions named try_... return a Status; all others throw an Error.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "tessera/tessera.h"

namespace tessera {

enum class Code : std::int32_t {
  ok = TESSERA_OK,
  invalid_argument = TESSERA_INVALID_ARGUMENT,  // a shape, stride, dtype, option or index is wrong
  unsupported = TESSERA_UNSUPPORTED,            // valid, but no kernel supports it
  internal = TESSERA_INTERNAL,                  // a defect of this library
  cancelled = TESSERA_CANCELLED                 // the executor's cancel ended the call: outputs are undefined
};

// A code and, unless it is ok, one line that names the argument, what was given and what is accepted.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(const tessera_status& status) : status_(status) {}  // NOLINT: a Status is the result of a C call

  Code code() const { return static_cast<Code>(status_.code); }
  bool ok() const { return status_.code == TESSERA_OK; }
  explicit operator bool() const { return ok(); }
  std::string_view message() const { return status_.message; }

 private:
  tessera_status status_{};
};

class Error : public std::runtime_error {
 public:
  explicit Error(const Status& status) : Error(status.code(), std::string(status.message())) {}
  Error(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}

  Code code() const { return code_; }

 private:
  Code code_;
};

// Throws Error unless the status is ok.
inline void throw_if_error(const Status& status) {
  if (!status.ok()) throw Error(status);
}

// "0.1.0"
inline std::string_view version() { return tessera_version(); }

}  // namespace tessera
