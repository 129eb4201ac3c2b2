// FNV-1a, 128 bits: http://www.isthe.com/chongo/tech/comp/fnv/. A content hash that guards against accidents, not
// attacks.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace tessera::cuda {

struct Digest {
  uint64_t high = 0, low = 0;

  bool operator==(const Digest&) const = default;
  std::string hex() const {
    constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (const uint64_t word : {high, low}) {
      for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[(word >> shift) & 15];
    }
    return text;
  }
};

class Hasher {
 public:
  void bytes(std::string_view data) {
    for (const char byte : data) state_ = (state_ ^ static_cast<unsigned char>(byte)) * kPrime;
  }
  // Includes the length, so that "ab", "c" and "a", "bc" differ.
  void text(std::string_view text) {
    number(static_cast<int64_t>(text.size()));
    bytes(text);
  }
  void number(int64_t value) {
    char data[sizeof value];
    std::memcpy(data, &value, sizeof value);
    bytes({data, sizeof data});
  }
  Digest digest() const { return {static_cast<uint64_t>(state_ >> 64), static_cast<uint64_t>(state_)}; }

 private:
  __extension__ using Word = unsigned __int128;
  static constexpr Word kPrime = Word{1} << 88 | 0x13b;

  Word state_ = Word{0x6c62272e07bb0142} << 64 | 0x62b821756295c58d;  // the offset basis
};

}  // namespace tessera::cuda
