// Nothing is thrown through the C interface.
#pragma once

#include <exception>
#include <stdexcept>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

#include "core/status.hpp"

namespace tessera::core {

// The caller's executor threw, or did not do what was asked of it.
struct ExecutorError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What body() answers, or what its exception stands for.
template <class Body>
tessera_status guarded(const char* function, const Body& body) {
  try {
    return body();
  } catch (const ExecutorError& error) {
    return invalid("executor: %s; outputs are undefined", error.what());
  } catch (const std::exception& error) {
    return internal("%s: %s", function, error.what());
  }
#if defined(__GLIBCXX__)
  catch (const abi::__forced_unwind&) {  // pthread_cancel, which may not be stopped
    throw;
  }
#endif
  catch (...) {
    return internal("%s: an exception that is no std::exception", function);
  }
}

}  // namespace tessera::core
