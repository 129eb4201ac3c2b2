// Python's lock, given up while the library computes. Before Python 3.14 a thread that takes the lock while the
// interpreter ends (a daemon thread) is ended by pthread_exit, whose unwinding meets destructors and catch (...) and so
// std::terminate. Such a thread stays where it is, as it does from Python 3.14 on: the process is about to end.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <exception>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace tessera::python {

// Runs `take`, which takes the lock; does not return where the interpreter ends the thread.
template <class Take>
void take_gil(Take&& take) {
#if defined(__GLIBCXX__)
  try {
    take();
  } catch (const abi::__forced_unwind&) {
    for (;;) pause();  // leaving the handler would end the process
  }
#else
  take();
#endif
}

class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    take_gil([this] { PyEval_RestoreThread(state_); });
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace tessera::python
