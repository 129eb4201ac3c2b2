// The conditions that threads wait for.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "mbarrier.hpp"

namespace tessera::emulated {

struct Wait {
  enum class Kind {
    kNothing,
    kWarp,      // for the other lanes, at instruction `what`
    kBlock,     // __syncthreads
    kNamed,     // bar.sync `number`
    kMbarrier,  // the phase of parity `value` at shared address `number`
    kMemory,    // until *word differs from `value`
    kCluster,   // barrier.cluster: until *counter differs from `value`
    kProducts,  // wgmma: until *counter is at least `value`
  };
  Kind kind = Kind::kNothing;
  const char* what = "";
  uint32_t number = 0;
  int64_t value = 0;
  const int* word = nullptr;
  const uint64_t* counter = nullptr;
  const Mbarrier* mbarrier = nullptr;

  bool operator==(const Wait&) const = default;

  // True if no event signals its end, so that it must be polled.
  bool polled() const { return kind >= Kind::kMbarrier; }
  bool over() const {
    switch (kind) {
      case Kind::kMbarrier:
        return mbarrier->parity() != value;
      case Kind::kMemory:
        return *static_cast<const volatile int*>(word) != value;
      case Kind::kCluster:
        return static_cast<int64_t>(*counter) != value;
      case Kind::kProducts:
        return static_cast<int64_t>(*counter) >= value;
      default:
        return false;
    }
  }

  std::string text() const {
    char text[160];
    switch (kind) {
      case Kind::kNothing:
        return "nothing";
      case Kind::kWarp:
        return std::string("the warp's other lanes at ") + what;
      case Kind::kBlock:
        return "__syncthreads";
      case Kind::kNamed:
        std::snprintf(text, sizeof text, "barrier %u", number);
        return text;
      case Kind::kMbarrier:
        std::snprintf(text, sizeof text, "mbarrier 0x%x, parity %d (%s)", number, static_cast<int>(value),
                      mbarrier->text().c_str());
        return text;
      case Kind::kMemory:
        std::snprintf(text, sizeof text, "memory at %p to be other than %d", static_cast<const void*>(word),
                      static_cast<int>(value));
        return text;
      case Kind::kCluster:
        return "barrier.cluster";
      case Kind::kProducts:
        return "its warpgroup's other threads at wgmma";
    }
    return "";
  }
};

}  // namespace tessera::emulated
