// What both passes of a program are made with.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "distributed/calls.hpp"
#include "distributed/program.hpp"

namespace tessera::distributed {

// Transfers of one kind with one peer, in one step.
struct Message {
  bool receive;
  int32_t peer;
  tessera_travels travels;
  bool partial;
  int32_t first_head, num_heads;
  std::vector<int64_t> chunks;
};

// A block with its tensors in the pass's memory.
struct KeyBlock {
  Block block;
  Slab k, v;
  Slab sum_k, sum_v;  // backward: float32, of this rank's group alone
};

class Pass {
 public:
  Pass(const tessera_ranks_plan& plan, const Setting& setting, Program& program);
  virtual ~Pass() = default;

 protected:
  struct PlannedCall {
    Rectangle rows;                    // all rows and keys; its mask, unless the call is packed
    std::vector<Rectangle> sequences;  // of a packed call; otherwise empty
    std::vector<int64_t> keys;         // the chunks of the block that has its keys

    bool packed() const { return !sequences.empty(); }
  };
  struct PlannedStep {
    std::vector<PlannedCall> calls;
    std::vector<int64_t> kept;  // chunks of other ranks that later steps use
  };

  // ---- the memory ----
  Slab make(int32_t dtype, int64_t rows, int64_t heads, int64_t columns);
  Slab make_statistics(int64_t rows, int64_t heads);
  void release(const Slab& slab);
  void release_at_end_of_step(const Slab& slab) { of_step_.push_back(slab); }
  Slab own_tensor(Base base, int64_t heads, int64_t columns) const;  // the caller's, of this rank's rows
  // What forward leaves for backward: the tensors of the group's rows and this rank's heads, and lse_low. `bytes` gets
  // the size of all.
  struct Saved {
    Slab q, k, v, o, lse, lse_low;
  };
  Saved saved(Base base, int64_t& bytes) const;

  // ---- operations ----
  // A slab of a 16-bit type only with 0; it may write the two bytes after the slab.
  void fill(const Slab& slab, float value);
  // `count` rows of `heads` heads: to = from, or to += from.
  void move(const Slab& from, int64_t from_row, int64_t from_head, const Slab& to, int64_t to_row, int64_t to_head,
            int64_t count, int64_t heads, bool add = false);
  // The chunks' rows in blocks of two tensors.
  void move_chunks(const std::vector<int64_t>& chunks, const Block& from_block, const Slab& from, int64_t from_head,
                   const Block& to_block, const Slab& to, int64_t to_head, int64_t heads, bool add = false);
  // Gives `call` the plan of its problem. any_family: a kernel family that the device names need not serve it.
  tessera_status plan_call(const tessera_problem& problem, Call& call, bool any_family = false);
  // The call, with a workspace for its time.
  void add_call(Call call);
  // The options of a call, without the tensors of queries and keys. A packed call's lengths become constants.
  tessera_problem problem_of(const PlannedCall& planned, int32_t direction, Call& call);
  // This rank's heads of the sink.
  bool has_sink() const { return setting_.options.sink != 0; }
  tessera_layout sink_layout() const { return {TESSERA_FLOAT32, 1, {schedule_.heads_q.count}, {1}}; }
  Ref of_heads(Base base) const { return {base, schedule_.heads_q.first * static_cast<int64_t>(sizeof(float))}; }
  bool placed() const { return setting_.options.dropout_p > 0 || setting_.options.alibi != 0 || may_hide_rows(); }
  // True if calls can be packed: nothing may depend on a sequence's number in the batch.
  bool packs() const {
    return problem_.num_sequences > 1 && !may_hide_rows() && setting_.options.dropout_p == 0 &&
           setting_.options.alibi < 2;
  }
  // True if a row may see none of the keys that it sees by position.
  bool may_hide_rows() const {
    const tessera_ranks_options& options = setting_.options;
    return options.program || options.bias.rank != 0 || options.mask.rank != 0;
  }
  // A call's part of a tensor [B|1, Hq|1, S|1, S] with the layout `whole`, which begins at `at` of its base.
  tessera_layout part_of(const tessera_layout& whole, const Rectangle& rows, Base base, Ref& at) const;

  // ---- messages ----
  std::vector<Message> messages_of(const tessera_rank_step& step) const;
  bool in_group(int32_t rank) const {
    return rank / plan_.problem.head_ranks == setting_.rank / plan_.problem.head_ranks;
  }
  // Whole rows of a tensor as a message: chunk by chunk and sequence by sequence, where they lie.
  void add_rows(const Message& message, const Block& block, const Slab& slab);
  // Rows of some heads travel through memory of their own, which they are copied to, or later from.
  Slab stage(const Message& message, int32_t dtype, int64_t columns, bool statistics = false);
  // Sends rows of `from` by a copy in `slab`, or receives them into it, where staged() finds them.
  void exchange(const Message& message, const Slab& from, const Block& block, int64_t head, const Slab& slab);
  void add_staged(const Message& message, const Slab& staged) {
    pieces_.push_back({message.receive, message.peer, staged.at, staged.bytes()});
  }

  // ---- steps ----
  // The schedule as calls, which needs no memory.
  tessera_status plan_steps();
  // Walks the steps: prepare(message) for each message, compute(calls), then deliver(message).
  tessera_status walk_steps();
  // After all operations: the size of the workspace.
  void finish_program();
  virtual void prepare(const Message& message) = 0;
  virtual tessera_status compute(size_t step, const std::vector<PlannedCall>& calls) = 0;
  virtual void deliver(const Message& message) = 0;

  KeyBlock& key_block(const std::vector<int64_t>& numbers);
  // A block for received keys, and its messages.
  void receive_keys(const Message& message);
  // Of a message that is received in this step.
  Slab& staged(const Message& message, size_t number) { return staged_.at(key_of(message))[number]; }
  void keep_staged(const Message& message, const Slab& slab) { staged_[key_of(message)].push_back(slab); }

  const tessera_ranks_plan& plan_;
  const tessera_ranks_problem& problem_;
  const Setting& setting_;
  Program& program_;
  RankSchedule schedule_;
  int64_t batch_;
  bool divided_;  // heads are divided
  std::vector<PlannedStep> steps_;
  size_t depth_ = 0;   // the most calls that write one row
  Block local_, own_;  // this rank's rows, and its group's
  KeyBlock keys_;      // of the group's rows
  std::deque<KeyBlock> fetched_;
  Arena arena_;

 private:
  using MessageKey = std::pair<int32_t, std::pair<int32_t, int64_t>>;
  static MessageKey key_of(const Message& message) {
    return {message.peer, {static_cast<int32_t>(message.travels), message.chunks.front()}};
  }
  struct KeyRows {
    std::vector<int64_t> keys;  // a block's chunks
    std::vector<Rectangle> rectangles;
  };
  std::vector<KeyRows> rectangles_of(const std::vector<tessera_rank_pair>& pairs,
                                     const std::vector<Block>& fetched) const;
  void plan_calls(const std::vector<std::vector<KeyRows>>& of_steps);
  Ref constant(const std::vector<int32_t>& values);

  std::vector<Piece> pieces_;
  std::vector<Slab> of_step_;
  std::map<MessageKey, std::vector<Slab>> staged_;
  std::map<std::string, size_t> plan_numbers_;         // by the problem's bytes
  std::map<std::vector<int32_t>, int64_t> constants_;  // their places among the program's, in bytes
};

}  // namespace tessera::distributed
