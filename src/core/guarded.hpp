// No exception leaves the C interface.
#pragma once

#include <exception>
#include <stdexcept>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

#include "core/status.hpp"

namespace tessera::core {

// Thrown if the caller's executor throws, or does not run every task.
struct ExecutorError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Returns the result of body(), or the status that its exception maps to.
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
  catch (const abi::__forced_unwind&) {  // pthread_cancel, which must not be intercepted
    throw;
  }
#endif
  catch (...) {
    return internal("%s: an exception that is no std::exception", function);
  }
}

}  // namespace tessera::core
