// Moves rows of tensors on a GPU.
#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstdint>

#include "core/status.hpp"
#include "cuda/kernels.hpp"
#include "cuda/ranks.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "cuda/runtime/launches.hpp"

namespace tessera::cuda {
namespace {

class DeviceRowMoves final : public core::RowMoves {
 public:
  explicit DeviceRowMoves(const tessera_device& device) : device_(device) {}

  tessera_status move(const core::RowsShape& given, const core::Rows& given_from, const core::Rows& given_to, bool add,
                      void* stream) override {
    core::RowsShape shape = given;
    core::Rows from = given_from, to = given_to;
    if (shape.columns == 1 && from.row == 1 && to.row == 1) {  // statistics: rows are what lies side by side
      shape = {shape.batch, shape.heads, 1, shape.rows};
      from.row = from.head, to.row = to.head;
    } else if (from.head == shape.columns && to.head == shape.columns) {
      shape = {shape.batch, shape.rows, 1, shape.heads * shape.columns};
    }
    MoveRowsConfig config{static_cast<Dtype>(from.dtype), static_cast<Dtype>(to.dtype), add, true};
    config.aligned = shape.columns % kMoveRowsWidth == 0 && is_aligned(from, shape) && is_aligned(to, shape);
    const int64_t vectors = shape.columns / move_rows_width(config);
    const int64_t units = shape.batch * shape.rows * shape.heads * vectors;
    constexpr int64_t kMost = INT32_MAX - kMoveRowsThreads;
    if (units > kMost) {
      return unsupported("ranks: %" PRId64 " vectors of %d columns in one move, accepted up to %" PRId64 " on a GPU",
                         units, move_rows_width(config), kMost);
    }
    MoveRowsParams params{};
    params.from = {from.data, from.batch, from.row, from.head}, params.to = {to.data, to.batch, to.row, to.head};
    params.vectors = Divisor(static_cast<int>(vectors));
    params.heads = Divisor(static_cast<int>(shape.heads)), params.rows = Divisor(static_cast<int>(shape.rows));
    params.units = static_cast<int>(units);
    return launch(stream, [&](LaunchList& list) { launch_move_rows(config, params, list); });
  }

  tessera_status fill(float* data, float value, int64_t count, void* stream) override {
    ContextScope context;
    TESSERA_RETURN_IF_ERROR(context.enter(device_.ordinal, stream));
    const Driver& cu = context.driver();
    return check(cu,
                 cu.cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(data), std::bit_cast<unsigned>(value),
                                     static_cast<size_t>(count), static_cast<CUstream>(stream)),
                 "cuMemsetD32Async");
  }

  tessera_status write(const int32_t* values, int64_t count, int32_t* to, void* stream) override {
    for (int64_t done = 0; done < count; done += kWriteWordsMost) {
      WriteWordsParams params{};
      params.to = to + done, params.count = static_cast<int>(std::min<int64_t>(count - done, kWriteWordsMost));
      std::copy_n(values + done, params.count, params.words);
      TESSERA_RETURN_IF_ERROR(launch(stream, [&](LaunchList& list) { launch_write_words(params, list); }));
    }
    return ok();
  }

 private:
  template <class Add>
  tessera_status launch(void* stream, const Add& add) {
    Launches launches(device_, stream);
    TESSERA_RETURN_IF_ERROR(launches.begin());
    LaunchList list(launches.driver());
    add(list);
    return submit(list, launches);
  }

  // Strides of axes with one entry do not matter.
  static bool is_aligned(const core::Rows& rows, const core::RowsShape& shape) {
    const auto bytes = kMoveRowsWidth * static_cast<uintptr_t>(tessera_dtype_bytes(rows.dtype));
    const auto whole = [](int64_t count, int64_t stride) { return count == 1 || stride % kMoveRowsWidth == 0; };
    return reinterpret_cast<uintptr_t>(rows.data) % bytes == 0 && whole(shape.batch, rows.batch) &&
           whole(shape.rows, rows.row) && whole(shape.heads, rows.head);
  }

  const tessera_device device_;
};

}  // namespace

std::unique_ptr<core::RowMoves> make_row_moves(const tessera_device& device) {
  return std::make_unique<DeviceRowMoves>(device);
}

}  // namespace tessera::cuda
