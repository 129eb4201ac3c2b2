// Ctrl-C ends a long call: the exception of Python's signal handler is raised once the library's threads have stopped.
#pragma once

#include <nanobind/nanobind.h>
#include <pthread.h>

#include <chrono>

#include "error.hpp"
#include "released_gil.hpp"
#include "tessera/tessera.h"

namespace tessera::python {

// The `cancel` of one call's executor. It must be created by the calling thread, which also works and so calls
// `cancel`; Python runs signal handlers only in its main thread, and needs the GIL for it.
class Interrupt {
 public:
  tessera_executor& add_to(tessera_executor& executor) {
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
