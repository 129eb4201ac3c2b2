// What a family computes once for a plan, although several candidates ask for it: families made of others ask these
// again, and those that need aligned data ask the family of their stand-in.
#pragma once

#include <cstdint>

#include "tessera/tessera.h"

namespace tessera::core {

// While it exists, a `Once` keeps what it computed for this plan, which does not change meanwhile.
class Asking {
 public:
  explicit Asking(const tessera_plan& plan) : outer_(now()) { now() = {&plan, outer_.number + 1}; }
  ~Asking() { now() = {outer_.plan, now().number}; }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;

  struct Now {
    const tessera_plan* plan = nullptr;
    uint64_t number = 0;  // of the last Asking of this thread
  };
  static Now& now() {
    static thread_local Now now;
    return now;
  }

 private:
  Now outer_;
};

// A thread's last result of a function of a plan.
template <class Result>
class Once {
 public:
  const Result& operator()(const tessera_plan& plan, Result (*compute)(const tessera_plan& plan)) {
    const Asking::Now& now = Asking::now();
    const bool asked = now.plan == &plan;
    if (!asked || number_ != now.number) result_ = compute(plan), number_ = asked ? now.number : 0;
    return result_;
  }

 private:
  Result result_{};
  uint64_t number_ = 0;  // of the Asking that it is for; 0: none
};

}  // namespace tessera::core
