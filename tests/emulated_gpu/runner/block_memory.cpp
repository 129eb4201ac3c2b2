// A block's shared memory, and its threads' wgmma products.
#include "block.hpp"
#include "runner/products.hpp"

namespace tessera::emulated {

char* Block::own_shared(uint32_t address, size_t bytes, size_t alignment) {
  if (address >> kRankShift != 0) fail("shared address 0x%x of the cluster where the block's own is wanted", address);
  return within(*this, address, bytes, alignment);
}
char* Block::cluster_shared(uint32_t address, size_t bytes, size_t alignment) {
  return within(block_of(address), address & kWhereMask, bytes, alignment);
}
Block& Block::block_of(uint32_t address) {
  const uint32_t rank = address >> kRankShift;
  if (rank == 0) return *this;
  if (rank > cluster_.blocks.size()) fail("shared address 0x%x of no block of the cluster", address);
  Block& block = *cluster_.blocks[rank - 1];
  if (!block.active()) fail("shared memory of block %u of the cluster, which has ended", rank - 1);
  if (!block.shared_.memory()) fail("shared memory of block %u of the cluster, which has not begun", rank - 1);
  return block;
}
Mbarrier& Block::own_mbarrier(uint32_t address) {
  return checked(own_shared(address, sizeof(Mbarrier), sizeof(Mbarrier)));
}
Mbarrier& Block::cluster_mbarrier(uint32_t address) {
  return checked(cluster_shared(address, sizeof(Mbarrier), sizeof(Mbarrier)));
}
Mbarrier& Block::checked(char* at) {
  Mbarrier& barrier = *reinterpret_cast<Mbarrier*>(at);
  if (!barrier.initialised()) {
    fail("mbarrier 0x%x is not initialised", shared_.address_of(at));
  }
  return barrier;
}
uint32_t Block::address_of(const void* pointer) {
  const uint32_t address = shared_.address_of(static_cast<const char*>(pointer));
  if (address == 0) fail("%p is not in shared memory", pointer);
  return address;
}
char* Block::within(Block& block, uint32_t where, size_t bytes, size_t alignment) {
  if (where % alignment != 0) fail("shared address 0x%x is no multiple of %zu", where, alignment);
  block.shared_.take_variables(shared_);
  char* const at = block.shared_.at(where, bytes);
  if (!at) {
    fail("shared address 0x%x, %zu bytes: the block has 0x%x ... 0x%x", where, bytes, SharedWindow::kBegin,
         shared_.end());
  }
  return at;
}
WarpgroupProducts& Block::warpgroup_products() {
  return products_[static_cast<size_t>(running.thread / kWarpgroupThreads)];
}
void Block::execute(WarpgroupProducts& products, uint64_t end) { check(products.execute(end, shared_)); }
void Block::issue_product(const Product& product, float* d, const uint32_t* a) {
  WarpgroupProducts& products = warpgroup_products();
  ProductPosition& at = thread().products;
  if (!products.may_issue(at)) {
    wait({.kind = Wait::Kind::kProducts,
          .value = static_cast<int64_t>(at.issued + 1 - WarpgroupProducts::kInFlight),
          .counter = products.complete()});
    execute(products, at.issued + 1 - WarpgroupProducts::kInFlight);
  }
  check(products.issue(at, running.thread % kWarpgroupThreads, product, d, a));
  if (*products.complete() == at.issued && (random().ordered() || random().one_in(2))) execute(products, at.issued);
}
void Block::commit_products() { warpgroup_products().commit(thread().products); }
void Block::wait_products(unsigned pending) {
  WarpgroupProducts& products = warpgroup_products();
  const uint64_t due = WarpgroupProducts::due(thread().products, pending);
  wait({.kind = Wait::Kind::kProducts, .value = static_cast<int64_t>(due), .counter = products.complete()});
  if (*products.executed() < due) execute(products, due);
  products.write_registers();
}

}  // namespace tessera::emulated
