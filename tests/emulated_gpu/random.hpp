// Random choices where a GPU's behaviour is unspecified: the same for the same seed.
#pragma once

#include <cstdint>

namespace tessera::emulated {

class Random {
 public:
  explicit Random(unsigned seed = 0) : state_((seed + 1) * 0x9E3779B97F4A7C15u), ordered_(seed == 0) {}

  // True with probability 1 / n; never for seed 0.
  bool one_in(unsigned n) { return !ordered_ && next() % n == 0; }
  // 0 ... n - 1; seed 0: 0.
  unsigned below(unsigned n) { return ordered_ ? 0 : next() % n; }
  bool ordered() const { return ordered_; }

  uint32_t next() {  // splitmix64
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return static_cast<uint32_t>(z >> 32);
  }

 private:
  uint64_t state_;
  bool ordered_;
};

}  // namespace tessera::emulated
