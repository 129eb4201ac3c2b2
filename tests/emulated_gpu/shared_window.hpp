// A block's shared memory by 18-bit addresses, as in matrix descriptors: 1024 bytes of the system, the dynamic part of
// the launch, and then the variables declared __shared__.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

// The maximum of a block on any GPU.
inline constexpr size_t kEmulatedSharedBytes = 232448;
alignas(1024) inline constinit thread_local char shared_memory[kEmulatedSharedBytes] = {};

}  // namespace tessera

namespace tessera::emulated {

class SharedWindow {
 public:
  static constexpr uint32_t kBegin = 1024, kEnd = 1 << 18, kAlignment = 1024;

  SharedWindow() = default;
  // The window of this thread of the host, which runs the block.
  explicit SharedWindow(uint32_t launched_bytes)
      : memory_(shared_memory),
        end_(kBegin + launched_bytes),
        variables_begin_((end_ + kAlignment - 1) / kAlignment * kAlignment) {}

  char* memory() const { return memory_; }
  uint32_t end() const { return end_; }

  // NULL if part of the range does not exist.
  char* at(uint32_t address, size_t bytes) const {
    if (address >= kBegin && address + bytes <= end_) return memory_ + (address - kBegin);
    if (address >= variables_begin_ && address + bytes <= kEnd && variables_)
      return variables_ + (address - variables_begin_);
    return nullptr;
  }

  // 0 if it is not in shared memory. The set of variables is unknown: those near the first one requested count.
  uint32_t address_of(const char* pointer) {
    if (pointer >= memory_ && pointer < memory_ + kEmulatedSharedBytes) {
      return static_cast<uint32_t>(pointer - memory_) + kBegin;
    }
    const auto room = static_cast<std::ptrdiff_t>(kEnd - variables_begin_);
    if (!variables_) {
      const std::ptrdiff_t first = pointer - memory_ - room / 2;
      variables_ = memory_ + first -
                   (first % static_cast<int>(kAlignment) + static_cast<int>(kAlignment)) % static_cast<int>(kAlignment);
    }
    const std::ptrdiff_t offset = pointer - variables_;
    return offset < 0 || offset >= room ? 0 : static_cast<uint32_t>(offset) + variables_begin_;
  }

  // Uses the same address for variables as `other`, of another block of the kernel.
  void take_variables(const SharedWindow& other) {
    if (!variables_ && other.variables_) variables_ = memory_ + (other.variables_ - other.memory_);
  }

 private:
  char* memory_ = nullptr;
  char* variables_ = nullptr;
  uint32_t end_ = 0, variables_begin_ = 0;
};

}  // namespace tessera::emulated
