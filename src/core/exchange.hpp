// What one rank of several needs of its device and of its peers, beside the library's own calls: moving rows of
// tensors, and messages. Each back end implements both.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/cancel.hpp"
#include "core/status.hpp"
#include "tessera/tessera.h"

namespace tessera::core {

// Rows of a tensor [batch, row, head, column]; strides in elements, columns are contiguous.
struct Rows {
  void* data;
  int32_t dtype;  // float32, float16 or bfloat16
  int64_t batch, row, head;
};
struct RowsShape {
  int64_t batch, rows, heads, columns;
};

class RowMoves {
 public:
  virtual ~RowMoves() = default;
  // Writes `from` to `to`, rounded to nearest where its dtype is shorter. add: adds it, `to` is float32.
  virtual tessera_status move(const RowsShape& shape, const Rows& from, const Rows& to, bool add, void* stream) = 0;
  virtual tessera_status fill(float* data, float value, int64_t count, void* stream) = 0;
  // Writes `count` values of the host's memory, which the caller may change after the return.
  virtual tessera_status write(const int32_t* values, int64_t count, int32_t* to, void* stream) = 0;
};

// A rank's side of an exchange. Between `begin` and `start`, messages are listed; all of them are then under way at
// once. Messages from one rank to another arrive in the order in which they were listed.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int32_t rank() const = 0;
  virtual int32_t ranks() const = 0;
  // OK if calls on `device` can exchange their data, and no call of a rank has failed that ends all later ones.
  virtual tessera_status check(const tessera_device& device) const = 0;

  // The messages begin when the work is done that `stream` has been given so far. `exchange` is the same number on all
  // ranks that make the same calls in the same order: threads compare it, so that others learn of their mistake.
  virtual tessera_status begin(uint64_t exchange, void* stream) = 0;
  virtual tessera_status send(const void* data, size_t bytes, int32_t peer) = 0;
  virtual tessera_status receive(void* data, size_t bytes, int32_t peer) = 0;
  virtual tessera_status start() = 0;
  // The work that `stream` is given from now on begins when the messages are complete. On a CPU `cancel` ends it.
  virtual tessera_status wait(void* stream, Cancel& cancel) = 0;

  // all[n] = `mine` of rank n, on the host: the only function that waits for a GPU.
  virtual tessera_status all_gather(uint64_t mine, uint64_t* all, void* stream, Cancel& cancel) = 0;
  // True while `stream` is captured into a graph, when nothing may wait for it.
  virtual bool capturing(void*) const { return false; }
  // This rank has ended its call for `reason`, while the others may wait for it: they get an error if the transport can
  // tell them. When it returns on a CPU, nothing that this rank sent is read. Any thread may call it at any time.
  virtual void abandon(const char* reason) noexcept = 0;
};

}  // namespace tessera::core
