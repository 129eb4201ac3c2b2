// Results of calls, formatted like printf: one line that names the argument, what was given and what is accepted.
#pragma once

#include "tessera/tessera.h"

#if defined(__GNUC__)
#define TESSERA_PRINTF_LIKE __attribute__((format(printf, 1, 2)))
#else
#define TESSERA_PRINTF_LIKE
#endif

namespace tessera {

// Does not zero the text past its end, since a call creates dozens of these.
inline tessera_status ok() {
  tessera_status status;
  status.code = TESSERA_OK;
  status.message[0] = '\0';
  return status;
}
TESSERA_PRINTF_LIKE tessera_status invalid(const char* format, ...);
TESSERA_PRINTF_LIKE tessera_status unsupported(const char* format, ...);
TESSERA_PRINTF_LIKE tessera_status internal(const char* format, ...);
tessera_status cancelled();

}  // namespace tessera

// Returns from the calling function with the first status that is not OK.
#define TESSERA_RETURN_IF_ERROR(expression)                                                \
  do {                                                                                     \
    if (tessera_status status_ = (expression); status_.code != TESSERA_OK) return status_; \
  } while (false)
