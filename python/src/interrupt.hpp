// Ctrl-C ends a long call: the exception of Python's signal handler is raised once the library's threads have stopped.
#pragma once

#include <nanobind/nanobind.h>
#include <pthread.h>

#include <chrono>

#include "error.hpp"
#include "released_gil.hpp"
#include "tessera/tessera.h"

namespace tessera::python {

// Python's main thread, the only one that runs signal handlers. After a fork it is the thread that forked.
inline pthread_t& main_thread() {
  static pthread_t thread;
  return thread;
}

// Called when the module is imported.
inline void find_main_thread() {
  const nanobind::object thread = nanobind::module_::import_("threading").attr("main_thread")();
  main_thread() = (pthread_t)nanobind::cast<unsigned long>(thread.attr("ident"));  // a number or a pointer
  pthread_atfork(nullptr, nullptr, [] { main_thread() = pthread_self(); });
}

// The `cancel` of one call's executor. It must be created by the calling thread, which also works and so calls
// `cancel`. Only calls of the main thread have one: no other thread runs signal handlers, and a daemon thread that
// requested the GIL after the end of the interpreter would find no interpreter.
class Interrupt {
 public:
  tessera_executor& add_to(tessera_executor& executor) {
    if (!pthread_equal(caller_, main_thread())) return executor;
    executor.cancel = [](void* self) { return static_cast<Interrupt*>(self)->asked(); };
    executor.cancel_context = this;
    return executor;
  }

  // Throws the handler's exception, or Error for any other failure. Needs the GIL.
  static void check(const tessera_status& status) {
    if (status.code == TESSERA_CANCELLED && PyErr_Occurred()) throw nanobind::python_error();
    python::check(status);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kPeriod = std::chrono::milliseconds(50);

  int32_t asked() {
    if (!pthread_equal(pthread_self(), caller_)) return 0;
    const Clock::time_point now = Clock::now();
    if (last_ == Clock::time_point{}) last_ = now;
    if (now - last_ < kPeriod) return 0;
    last_ = now;
    PyGILState_STATE state{};
    take_gil([&state] { state = PyGILState_Ensure(); });
    const bool raised = PyErr_CheckSignals() != 0;
    PyGILState_Release(state);
    return raised;
  }

  const pthread_t caller_ = pthread_self();
  Clock::time_point last_;
};

}  // namespace tessera::python
