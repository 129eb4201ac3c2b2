#include "core/status.hpp"

#include <cstdarg>
#include <cstdio>

namespace tessera {
namespace {

tessera_status make_status(tessera_code code, const char* format, va_list arguments) {
  tessera_status status{};
  status.code = code;
  std::vsnprintf(status.message, sizeof status.message, format, arguments);
  return status;
}

}  // namespace

tessera_status invalid(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const tessera_status status = make_status(TESSERA_INVALID_ARGUMENT, format, arguments);
  va_end(arguments);
  return status;
}

tessera_status unsupported(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const tessera_status status = make_status(TESSERA_UNSUPPORTED, format, arguments);
  va_end(arguments);
  return status;
}

tessera_status internal(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const tessera_status status = make_status(TESSERA_INTERNAL, format, arguments);
  va_end(arguments);
  return status;
}

tessera_status cancelled() {
  tessera_status status{};
  status.code = TESSERA_CANCELLED;
  std::snprintf(status.message, sizeof status.message,
                "cancelled: the executor's cancel said so; outputs are undefined");
  return status;
}

}  // namespace tessera
