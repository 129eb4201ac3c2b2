// Each rank's list of steps: a pure function of a checked problem with a chosen strategy.
#pragma once

#include <utility>
#include <vector>

#include "distributed/band.hpp"
#include "tessera/distributed.h"

namespace tessera::distributed {

struct Schedule {
  std::vector<tessera_rank_step> steps;  // without the model's times
  std::vector<tessera_rank_pair> pairs;
  std::vector<tessera_rank_transfer> transfers;
};

// Query or KV heads.
struct Heads {
  int32_t first, count;
};

// The ranks as a mesh: groups of head_ranks consecutive ranks share their rows and divide the heads. Ring and
// all_gather are meshes whose groups have one rank, all_to_all is a mesh of a single group.
class Mesh {
 public:
  Mesh(const tessera_ranks_problem& problem, const std::vector<tessera_chunk>& chunks);

  Schedule schedule(int32_t rank) const;
  Heads heads_q(int32_t rank) const;
  Heads heads_kv(int32_t rank) const;

 private:
  using Chunks = std::vector<int64_t>;  // their indices, ascending
  struct Run {                          // consecutive chunks of a sequence
    int32_t sequence;
    Range rows;
    int64_t chunk, chunks;
  };
  class Builder;

  std::vector<Run> runs_of(const Chunks& chunks) const;
  // Some rows of a run, with only the chunks that have them.
  Run cropped(const Run& run, Range rows) const;
  // The chunks of group `keys` with a key that some query of group `queries` sees.
  Chunks seen(int64_t queries, int64_t keys) const;
  // The rows that see none of the keys, and those that see some; both begin at multiples of chunk_rows from a run's
  // first row.
  std::pair<std::vector<Run>, std::vector<Run>> divide(const std::vector<Run>& queries, const Chunks& keys) const;
  std::vector<tessera_rank_pair> pairs_of(const std::vector<Run>& queries, const std::vector<Run>& keys) const;
  static std::vector<tessera_rank_pair> cut(const Band& band, const tessera_rank_pair& whole);
  // Splits a rank's own pairs into two halves of about the same area.
  static void halve(const Band& band, std::vector<tessera_rank_pair>& first, std::vector<tessera_rank_pair>& last);
  tessera_rank_pair pair_of(const Run& queries, const Run& keys, const Visible& visible) const;
  bool sums_heads() const { return problem_.heads_kv % head_ranks_ != 0; }  // several ranks read one KV head

  tessera_ranks_problem problem_;
  const std::vector<tessera_chunk>& chunks_;
  Band band_;
  int64_t head_ranks_, groups_;
  std::vector<Chunks> chunks_of_rank_, chunks_of_group_;
  std::vector<std::vector<Run>> runs_of_group_;
  std::vector<int64_t> distances_;  // of groups whose keys a group's queries see, for any group
};

}  // namespace tessera::distributed
