// The cache's pages: which are free, and how many sequences hold each. A shared page is never written: only full pages
// are shared, and new keys go past a sequence's end.
#pragma once

#include <cstdint>
#include <vector>

namespace serve {

class PageAllocator {
 public:
  explicit PageAllocator(std::int64_t pages) : holders_(static_cast<std::size_t>(pages)) {
    for (auto page = static_cast<std::int32_t>(pages); page-- > 0;) free_.push_back(page);
  }

  std::int64_t size() const { return static_cast<std::int64_t>(holders_.size()); }
  std::int64_t available() const { return static_cast<std::int64_t>(free_.size()); }

  // A free page; there must be one.
  std::int32_t take() {
    const std::int32_t page = free_.back();
    free_.pop_back();
    holders_[page] = 1;
    return page;
  }

  void share(std::int32_t page) { ++holders_[page]; }

  void release(std::int32_t page) {
    if (--holders_[page] == 0) free_.push_back(page);
  }

 private:
  std::vector<std::int32_t> holders_;  // of each page
  std::vector<std::int32_t> free_;
};

}  // namespace serve
