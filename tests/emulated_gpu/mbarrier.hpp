// A barrier in shared memory that counts arrivals and bytes, stored in its 8 bytes. A phase ends when all arrivals and
// all bytes have come.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace tessera::emulated {

class Mbarrier {
 public:
  static constexpr int kMostArrivals = 0x3fff, kMostBytes = 1 << 20;

  explicit Mbarrier(int arrivals)
      : arrivals_(static_cast<uint16_t>(arrivals & kMostArrivals)), phase_(0), left_(arrivals_), bytes_(0) {}

  // As far as its bits show.
  bool initialised() const {
    return arrivals_ > 0 && left_ <= arrivals_ && bytes_ > -kMostBytes && bytes_ < kMostBytes;
  }
  int parity() const { return phase_; }

  // Returns "" or the error.
  const char* arrive() {
    if (left_ == 0) return "more arrivals than the phase has";
    --left_;
    return end_phase();
  }
  const char* expect(int bytes) {
    if (left_ == 0) return "bytes are expected after the phase's last arrival";
    bytes_ += bytes;
    return "";
  }
  const char* complete(int bytes) {
    bytes_ -= bytes;
    return end_phase();
  }

  std::string text() const {
    if (!initialised()) return "not initialised";
    char text[96];
    std::snprintf(text, sizeof text, "in parity %d, %d of %d arrivals to come, %d bytes to come", phase_, left_,
                  arrivals_, bytes_);
    return text;
  }

 private:
  const char* end_phase() {
    if (left_ > 0 || bytes_ > 0) return "";
    if (bytes_ < 0) return "more bytes than the phase expects";
    left_ = arrivals_;
    phase_ ^= 1;
    return "";
  }

  uint16_t arrivals_ : 14, phase_ : 1;
  uint16_t left_;
  int32_t bytes_;
};
static_assert(sizeof(Mbarrier) == 8);

}  // namespace tessera::emulated
