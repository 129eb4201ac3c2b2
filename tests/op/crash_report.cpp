#include "crash_report.hpp"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>

#include "check.hpp"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
extern "C" void __sanitizer_set_death_callback(void (*callback)());
#endif

namespace tessera::testing {
namespace {

char current_line[2048];

// Calls only functions that are safe in a signal handler.
void print_current_case() {
  if (current_line[0] && write(STDERR_FILENO, current_line, std::strlen(current_line)) < 0) return;
}

extern "C" void on_signal(int signal) {
  print_current_case();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

}  // namespace

void install_crash_report() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  __sanitizer_set_death_callback(print_current_case);
#else
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) std::signal(signal, on_signal);
#endif
}

void set_current_case(const Case& c, const std::vector<Place>& places) {
  std::snprintf(current_line, sizeof current_line, "crashed in this case, replay: %s\n", replay(c, places).c_str());
}

}  // namespace tessera::testing
