// Releases the GIL while the library computes. Before Python 3.14, a thread that acquires the GIL while the interpreter
// ends (a daemon thread) is ended by pthread_exit, whose unwinding meets destructors and catch (...), and so calls
// std::terminate. Such a thread is suspended instead, as in Python 3.14 and later: the process is about to end.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <exception>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace tessera::python {

// Runs `take`, which acquires the GIL; does not return if the interpreter ends the thread.
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
