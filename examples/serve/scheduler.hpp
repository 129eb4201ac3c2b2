// Continuous batching: which sequences are in a step, with how many tokens, and which pages hold their keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pages.hpp"

namespace serve {

struct Limits {
  std::int64_t batch;        // sequences of a step
  std::int64_t step_tokens;  // new tokens of a step
  std::int64_t chunk;        // new tokens of a sequence in a step
  std::int64_t page_size, pages;
  std::int64_t longest;  // tokens of a sequence, the system prompt included

  std::int64_t max_pages() const { return pages_for(longest); }  // of a sequence
  std::int64_t pages_for(std::int64_t tokens) const { return (tokens + page_size - 1) / page_size; }
};

struct Sequence {
  std::int64_t arrival = 0;          // the step in which it arrives
  std::int64_t prompt = 0;           // tokens of the prompt, the system prompt included
  std::int64_t new_tokens = 0;       // how many to generate
  std::vector<std::int32_t> tokens;  // prompt, then generated tokens
  std::int64_t cached = 0;           // tokens whose keys are in the cache
  std::vector<std::int32_t> pages;
  std::vector<float> logits;  // [generated, vocab], if requested

  std::int64_t size() const { return static_cast<std::int64_t>(tokens.size()); }
  bool finished() const { return size() == prompt + new_tokens; }
};

// A step's index arrays, for tessera_append and tessera_forward, of a fixed size: sequences that are not in the step
// have no token and no key.
struct Step {
  std::int64_t num_tokens = 0;
  bool decoding = true;                  // no sequence has more than one token
  std::vector<std::int32_t> tokens;      // [step_tokens]
  std::vector<std::int32_t> cu_seqlens;  // [batch + 1]
  std::vector<std::int32_t> seqused;     // [batch], keys with the new ones
  std::vector<std::int32_t> last;        // [batch], the row of each sequence's last token
  std::vector<std::int32_t> page_table;  // [batch, max_pages]
};

class Scheduler {
 public:
  // The requests are in the order of their arrival, and each prompt begins with `system`. That is computed first; its
  // full pages then serve all requests.
  Scheduler(const Limits& limits, const std::vector<std::int32_t>& system, std::span<Sequence> requests)
      : limits_(limits), pages_(limits.pages), slots_(static_cast<std::size_t>(limits.batch)) {
    for (Sequence& request : requests) {
      // The oldest sequence can always continue, if only alone, so all requests finish.
      const std::int64_t tokens = request.prompt + request.new_tokens;
      const std::int64_t most = std::min(limits_.longest, limits_.pages * limits_.page_size);
      if (tokens > most) {
        throw std::invalid_argument("a request of " + std::to_string(tokens) + " tokens, accepted at most " +
                                    std::to_string(most));
      }
      waiting_.push_back(&request);
    }
    if (system.empty()) return;
    prefix_.tokens = system;
    prefix_.prompt = prefix_.size();
    slots_[0] = &prefix_;
    by_age_.push_back(0);
  }

  bool done() const { return by_age_.empty() && waiting_.empty(); }
  std::int64_t pages_in_use() const { return pages_.size() - pages_.available(); }
  std::int64_t shared_pages() const { return static_cast<std::int64_t>(shared_.size()); }
  std::int64_t preempted() const { return preempted_; }

  // The next step, number `now`; without tokens if all remaining requests arrive later.
  Step next(std::int64_t now) {
    admit(now);
    // First one token for each generating sequence, then chunks of prompts with the remaining tokens.
    std::vector<std::int64_t> counts(slots_.size(), 0);
    std::int64_t budget = limits_.step_tokens;
    for (const bool prompts : {false, true}) {
      for (std::size_t n = 0; n < by_age_.size(); ++n) {
        const std::size_t slot = by_age_[n];
        const std::int64_t left = slots_[slot]->size() - slots_[slot]->cached;
        if ((left > 1) != prompts) continue;
        counts[slot] = std::min({left, limits_.chunk, budget});
        budget -= counts[slot];
      }
    }
    // The oldest first; if no page is left, the youngest releases its pages and computes its keys again later.
    for (std::size_t n = 0; n < by_age_.size(); ++n) {
      const std::size_t slot = by_age_[n];
      Sequence& sequence = *slots_[slot];
      const std::int64_t needed = limits_.pages_for(sequence.cached + counts[slot]);
      while (n < by_age_.size() && static_cast<std::int64_t>(sequence.pages.size()) < needed) {
        if (pages_.available() > 0) {
          sequence.pages.push_back(pages_.take());
        } else {
          counts[by_age_.back()] = 0;
          preempt_youngest();
        }
      }
    }
    return laid_out(counts);
  }

  // After the step: next_tokens [batch], valid for complete sequences. Calls generated(sequence, slot) for each of
  // them.
  template <typename Generated>
  void advance(const Step& step, const std::vector<std::int32_t>& next_tokens, const Generated& generated) {
    for (std::size_t n = 0; n < by_age_.size();) {
      const std::size_t slot = by_age_[n];
      Sequence& sequence = *slots_[slot];
      sequence.cached += step.cu_seqlens[slot + 1] - step.cu_seqlens[slot];
      if (sequence.cached == sequence.size() && !sequence.finished()) {
        sequence.tokens.push_back(next_tokens[slot]);
        generated(sequence, slot);
      }
      // The system prompt generates nothing: it is finished once it is computed.
      if (sequence.finished() && (sequence.new_tokens > 0 || sequence.cached == sequence.size())) {
        retire(n);
      } else {
        ++n;
      }
    }
  }

 private:
  void admit(std::int64_t now) {
    const bool prefix_is_computed = by_age_.empty() || slots_[by_age_[0]] != &prefix_;
    while (prefix_is_computed && !waiting_.empty() && waiting_.front()->arrival <= now &&
           by_age_.size() < slots_.size()) {
      Sequence& next = *waiting_.front();
      // Room for all of its known tokens: otherwise it would be the first to be preempted.
      if (limits_.pages_for(next.size()) - shared_pages() > pages_.available()) return;
      waiting_.pop_front();
      for (const std::int32_t page : shared_) pages_.share(page);
      next.pages = shared_;
      next.cached = shared_pages() * limits_.page_size;
      const auto free_slot = std::ranges::find(slots_, nullptr);
      *free_slot = &next;
      by_age_.push_back(static_cast<std::size_t>(free_slot - slots_.begin()));
    }
  }

  // Removes the n-th oldest sequence from its slot and releases its pages.
  Sequence& vacate(std::size_t n) {
    Sequence& sequence = *std::exchange(slots_[by_age_[n]], nullptr);
    by_age_.erase(by_age_.begin() + static_cast<std::ptrdiff_t>(n));
    for (const std::int32_t page : sequence.pages) pages_.release(page);
    sequence.pages.clear();
    return sequence;
  }

  void preempt_youngest() {
    waiting_.push_front(&vacate(by_age_.size() - 1));
    ++preempted_;
  }

  void retire(std::size_t n) {
    if (slots_[by_age_[n]] == &prefix_) {
      shared_ = prefix_.pages;
      shared_.resize(static_cast<std::size_t>(prefix_.size() / limits_.page_size));  // full ones alone
      for (const std::int32_t page : shared_) pages_.share(page);
    }
    vacate(n);
  }

  Step laid_out(const std::vector<std::int64_t>& counts) const {
    Step step;
    step.tokens.assign(static_cast<std::size_t>(limits_.step_tokens), 0);
    step.cu_seqlens = {0};
    step.page_table.assign(static_cast<std::size_t>(limits_.batch * limits_.max_pages()), 0);
    for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
      const std::int64_t count = counts[slot];
      if (count > 0) {
        const Sequence& sequence = *slots_[slot];
        std::copy_n(sequence.tokens.begin() + sequence.cached, count, step.tokens.begin() + step.num_tokens);
        std::ranges::copy(sequence.pages,
                          step.page_table.begin() + static_cast<std::ptrdiff_t>(slot) * limits_.max_pages());
      }
      step.seqused.push_back(count > 0 ? static_cast<std::int32_t>(slots_[slot]->cached + count) : 0);
      step.num_tokens += count;
      step.decoding = step.decoding && count <= 1;
      step.cu_seqlens.push_back(static_cast<std::int32_t>(step.num_tokens));
      step.last.push_back(static_cast<std::int32_t>(count > 0 ? step.num_tokens - 1 : 0));
    }
    return step;
  }

  Limits limits_;
  PageAllocator pages_;
  std::deque<Sequence*> waiting_;
  std::vector<Sequence*> slots_;      // the sequence of each row of the page table
  std::vector<std::size_t> by_age_;   // slots in use, the oldest sequence first
  Sequence prefix_;                   // the system prompt
  std::vector<std::int32_t> shared_;  // its full pages
  std::int64_t preempted_ = 0;
};

}  // namespace serve
