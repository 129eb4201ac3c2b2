// The effects of bulk copies, by tensor map and without.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
#include <algorithm>

#include "block.hpp"
#include "runner/swizzle_bits.hpp"

namespace tessera::emulated {
namespace {

void check_global(Block& block, const void* address, size_t bytes) {
  if (emulated_is_mapped && !emulated_is_mapped(reinterpret_cast<uint64_t>(address), bytes)) {
    block.fail("a bulk copy of %zu bytes at %p, which is not allocated", bytes, address);
  }
}

// Visits a box in shared memory row by row: each(address of the row in shared memory, the first column's address in
// global memory, bytes before the tensor's columns begin, bytes within the tensor, bytes of the row). Rows outside the
// tensor have no bytes within it.
template <class Each>
void for_rows(Block& block, const AsyncCopy& copy, uint32_t shared, const Each& each) {
  const EmulatedTensorMap& map = copy.map;
  if (map.magic != EmulatedTensorMap::kMagic || map.rank != 4) block.fail("no tensor map of four dimensions");
  const int64_t row_bytes = int64_t{map.box[0]} * map.element_bytes;
  const int64_t first = int64_t{copy.at[0]} * map.element_bytes, end = int64_t{map.extents[0]} * map.element_bytes;
  const int64_t before = std::clamp<int64_t>(-first, 0, row_bytes);
  const int64_t wanted = std::clamp<int64_t>(end - first, 0, row_bytes) - before;
  int n = 0;
  for (int i3 = 0; i3 < map.box[3]; ++i3)
    for (int i2 = 0; i2 < map.box[2]; ++i2)
      for (int i1 = 0; i1 < map.box[1]; ++i1, ++n) {
        const int64_t c[3] = {copy.at[1] + i1, copy.at[2] + i2, copy.at[3] + i3};
        bool inside = wanted > 0;
        int64_t offset = first;
        for (int d = 0; d < 3; ++d) {
          inside = inside && c[d] >= 0 && c[d] < map.extents[d + 1];
          offset += c[d] * static_cast<int64_t>(map.strides[d]);
        }
        const auto from = reinterpret_cast<char*>(map.address + static_cast<uint64_t>(offset));
        each(shared + static_cast<uint32_t>(n * row_bytes), from, before, inside ? wanted : 0, row_bytes);
      }
}

size_t box_bytes(const EmulatedTensorMap& map) {
  return size_t{map.box[0]} * map.box[1] * map.box[2] * map.box[3] * map.element_bytes;
}

// Visits each 16 bytes of a row in shared memory at their swizzled place: each(address, offset in the row).
template <class Each>
void for_words(Block& block, const EmulatedTensorMap& map, uint32_t row, int64_t row_bytes, const Each& each) {
  constexpr int kNotSwizzled = 0, kSwizzle128B = 3;
  if (map.swizzle != kNotSwizzled && map.swizzle != kSwizzle128B)
    block.fail("a tensor map's swizzle that is not emulated");
  if (row_bytes % 16 != 0) block.fail("boxes whose rows are no multiple of 16 bytes");
  if (map.swizzle == kSwizzle128B && row_bytes > 128) block.fail("swizzled boxes whose rows have more than 128 bytes");
  for (int64_t n = 0; n < row_bytes; n += 16) {
    const uint32_t at = row + static_cast<uint32_t>(n);
    each(map.swizzle == kSwizzle128B ? swizzled_128b(at) : at, n);
  }
}

constexpr size_t kBoxAlignment = 128;

void load_box(Block& block, const AsyncCopy& copy, uint32_t shared, uint32_t barrier) {
  const size_t all = box_bytes(copy.map);
  char* const to = block.cluster_shared(shared, all, kBoxAlignment);
  for_rows(block, copy, shared, [&](uint32_t row, const char* from, int64_t before, int64_t wanted, int64_t row_bytes) {
    if (wanted > 0) check_global(block, from + before, static_cast<size_t>(wanted));
    for_words(block, copy.map, row, row_bytes, [&](uint32_t at, int64_t n) {
      char word[16] = {};
      const int64_t begin = std::max(before, n), end = std::min(before + wanted, n + 16);
      if (begin < end) std::memcpy(word + (begin - n), from + begin, static_cast<size_t>(end - begin));
      std::memcpy(to + (at - shared), word, sizeof word);
    });
  });
  block.check(block.cluster_mbarrier(barrier).complete(static_cast<int>(all)));
}

void run_load(Block& block, const AsyncCopy& copy) {
  const auto bytes = static_cast<size_t>(copy.bytes);
  switch (copy.kind) {
    case AsyncCopy::Kind::kLoadBox:
      if (copy.blocks == 0) return load_box(block, copy, copy.to, copy.barrier);
      for (int rank = 0; rank < static_cast<int>(block.cluster().blocks.size()); ++rank) {
        if (copy.blocks >> rank & 1) load_box(block, copy, in_block(copy.to, rank), in_block(copy.barrier, rank));
      }
      return;
    case AsyncCopy::Kind::kLoad:
      check_global(block, copy.global, bytes);
      std::memcpy(block.cluster_shared(copy.to, bytes, 16), copy.global, bytes);
      break;
    case AsyncCopy::Kind::kSendShared:
      std::memcpy(block.cluster_shared(copy.to, bytes, 16), block.own_shared(copy.from, bytes, 16), bytes);
      break;
    case AsyncCopy::Kind::kSendWords:
      std::memcpy(block.cluster_shared(copy.to, bytes, 16), copy.words, bytes);
      break;
    default:
      block.fail("a store among loads");
  }
  block.check(block.cluster_mbarrier(copy.barrier).complete(copy.bytes));
}

void poison_target(Block& block, const AsyncCopy& copy) {
  const bool box = copy.kind == AsyncCopy::Kind::kLoadBox;
  const size_t bytes = box ? box_bytes(copy.map) : static_cast<size_t>(copy.bytes);
  const auto poison = [&](uint32_t to) {
    std::memset(block.cluster_shared(to, bytes, box ? kBoxAlignment : 16), 0xff, bytes);
  };
  if (copy.blocks == 0) return poison(copy.to);
  for (int rank = 0; rank < static_cast<int>(block.cluster().blocks.size()); ++rank) {
    if (copy.blocks >> rank & 1) poison(in_block(copy.to, rank));
  }
}

void read_source(Block& block, const AsyncCopy& copy, std::vector<char>& bytes) {
  const bool box = copy.kind == AsyncCopy::Kind::kStoreBox;
  const size_t count = box ? box_bytes(copy.map) : static_cast<size_t>(copy.bytes);
  const char* const from = block.own_shared(copy.from, count, box ? kBoxAlignment : 16);
  bytes.assign(from, from + count);
}

void write_target(Block& block, const AsyncCopy& copy, const std::vector<char>& bytes) {
  switch (copy.kind) {
    case AsyncCopy::Kind::kStoreBox:
      for_rows(block, copy, copy.from, [&](uint32_t row, char* to, int64_t before, int64_t wanted, int64_t row_bytes) {
        if (wanted > 0) check_global(block, to + before, static_cast<size_t>(wanted));
        for_words(block, copy.map, row, row_bytes, [&](uint32_t at, int64_t n) {
          const int64_t begin = std::max(before, n), end = std::min(before + wanted, n + 16);
          if (begin < end) {
            std::memcpy(to + begin, bytes.data() + (at - copy.from) + (begin - n), static_cast<size_t>(end - begin));
          }
        });
      });
      return;
    case AsyncCopy::Kind::kStore:
      check_global(block, copy.global, bytes.size());
      std::memcpy(copy.global, bytes.data(), bytes.size());
      return;
    case AsyncCopy::Kind::kAddFloats: {
      check_global(block, copy.global, bytes.size());
      float* const to = static_cast<float*>(copy.global);
      for (size_t n = 0; n < bytes.size() / sizeof(float); ++n) {
        float x;
        std::memcpy(&x, bytes.data() + n * sizeof x, sizeof x);
        to[n] += x;
      }
      return;
    }
    default:
      block.fail("a load among stores");
  }
}

}  // namespace

void Block::copy_elements(uint32_t to, const void* from, int bytes, int size) {
  if (bytes < 0 || bytes > size) fail("cp.async of %d bytes", bytes);
  if (bytes > 0 && reinterpret_cast<uintptr_t>(from) % static_cast<unsigned>(size) != 0) fail("cp.async from %p", from);
  Thread& me = thread();
  me.element_copies.push_back({to, from, bytes, size, me.element_groups});
  if (!element_copies_late_) return land_groups(me.element_groups + 1);
  const auto written = static_cast<size_t>(size);
  std::memset(own_shared(to, written, written), 0xff, written);
}
void Block::wait_elements(unsigned pending) {
  const unsigned groups = thread().element_groups;
  if (groups >= pending) land_groups(groups - pending);
}
// Completes the groups before `end`.
void Block::land_groups(unsigned end) {
  auto& copies = thread().element_copies;
  size_t landed = 0;
  for (; landed < copies.size() && copies[landed].group < end; ++landed) {
    const Thread::ElementCopy& copy = copies[landed];
    const auto written = static_cast<size_t>(copy.size);
    char* const to = own_shared(copy.to, written, written);
    std::memset(to, 0, written);
    if (copy.bytes > 0) std::memcpy(to, copy.from, static_cast<size_t>(copy.bytes));
  }
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(landed));
}

void Block::start_load(const AsyncCopy& copy) {
  if (random().ordered() || random().below(2) == 0) return run_load(*this, copy);
  poison_target(*this, copy);
  copies_.push_back(copy);
}
bool Block::run_a_copy() {
  if (copies_.empty()) return false;
  const auto at = copies_.begin() + static_cast<std::ptrdiff_t>(random().below(static_cast<unsigned>(copies_.size())));
  const AsyncCopy next = *at;
  copies_.erase(at);
  run_load(*this, next);
  return true;
}
void Block::start_store(const AsyncCopy& copy) {
  thread().stores.emplace_back().copy = copy;
  if (random().ordered() || random().below(2) == 0) finish(thread().stores.back());
}
void Block::commit_stores() {
  for (Thread::Store& store : thread().stores) store.committed = true;
}
void Block::wait_stores(bool read_alone) {
  std::vector<Thread::Store>& stores = thread().stores;
  for (Thread::Store& store : stores) {
    if (!store.committed) continue;
    if (!store.has_read) read_source(*this, store.copy, store.read), store.has_read = true;
    if (!read_alone) finish(store);
  }
  std::erase_if(stores, [](const Thread::Store& store) { return store.written && store.committed; });
}
void Block::finish(Thread::Store& store) {
  if (store.written) return;
  if (!store.has_read) read_source(*this, store.copy, store.read);
  write_target(*this, store.copy, store.read);
  store.has_read = store.written = true;
}

}  // namespace tessera::emulated
