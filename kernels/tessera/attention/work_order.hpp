// In which order persistent blocks (fwd_sm90, fwd_sm80's) take the tiles of queries, which differ in size under a
// staircase. Plain integers, for the device and for the host's tests; the numbers in WorkOrder come from
// src/cuda/work_order.cpp.
//
// Works stand in one sequence. First the tiles of `turns` heads: of each the largest, the smallest, the second largest ...,
// and a block takes two neighbours, a pair, which are the same work for every block. Then sections of heads: the largest
// tiles of all of these, the second largest ..., dealt to the blocks there and back again. Of two neighbouring sections one
// begins with its smallest, so that at their border, which blocks reach at different times, no tile is much larger than the
// next; the last ends with its smallest. Pairs end in a ragged round: the first section goes on where it ends, so that
// blocks with a pair less begin with the largest tiles.
#pragma once

#include "tessera/attention/divisor.hpp"
#include "tessera/types.hpp"

namespace tessera {

// How persistent blocks' works stand in one sequence: attention/work_order.hpp.
struct WorkOrder {
  Divisor tiles;    // of a head (packed: slots of the batch); heads * tiles works in all
  int heads;        // (batch, head) pairs, packed: heads; (batch, head, split) where keys are split
  int turns;        // heads, the first, whose large and small tiles come in turns; turns * tiles is even, or all works
  Divisor section;  // heads of the others whose tiles stand together
  Divisor section_works;  // section * tiles
  int rising;  // 1: the first section begins with its smallest tiles; 0: with its largest. The next is the other way
};

TESSERA_HOST_DEVICE constexpr int works_of(const WorkOrder& order) { return order.heads * order.tiles; }
TESSERA_HOST_DEVICE constexpr int turn_works(const WorkOrder& order) { return order.turns * order.tiles; }

struct WorkPlace {
  int head;  // batch * heads_q + head, packed: head
  int slot;  // tile, or slot of a packed batch; 0 is a sequence's last queries
};

TESSERA_HOST_DEVICE constexpr WorkPlace work_place(const WorkOrder& order, int index) {
  const int tiles = order.tiles;
  if (index < order.turns * tiles) {
    const int head = index / order.tiles;
    int slot = index - head * tiles;
    if (tiles % 2 && head % 2) slot = tiles - 1 - slot;  // so that two heads' middle tiles are neighbours
    return {head, slot % 2 ? tiles - 1 - slot / 2 : slot / 2};
  }
  index -= order.turns * tiles;
  const int section = index / order.section_works, head = order.turns + section * order.section;
  const int rest = order.heads - head;
  index -= section * order.section_works;
  const int width = rest < order.section ? rest : order.section;
  const int slot = rest < order.section ? index / rest : index / order.section;
  return {head + index - slot * width, (section + order.rising) % 2 ? tiles - 1 - slot : slot};
}

// The works of one of the grid's blocks, in their order: they grow, and the first that is none ends them.
struct BlockWorks {
  int work;
  int step;  // to the next; the step after that is 2 * blocks - step

  TESSERA_HOST_DEVICE constexpr BlockWorks(const WorkOrder& order, int block, int blocks) : work(2 * block), step(1) {
    if (work >= turn_works(order)) begin_sections(order, block, blocks);
  }
  TESSERA_HOST_DEVICE constexpr void advance(const WorkOrder& order, int block, int blocks) {
    const int turns = turn_works(order);
    const bool in_turns = work < turns;
    work += step;
    step = 2 * blocks - step;
    if (in_turns && work >= turns) begin_sections(order, block, blocks);
  }

 private:
  // The round of pairs that is not complete goes on as the sections' first, forwards; the next goes backwards.
  TESSERA_HOST_DEVICE constexpr void begin_sections(const WorkOrder& order, int block, int blocks) {
    const int turns = turn_works(order);
    const int past = (work - turns) / 2;  // how far my next pair would lie behind the last
    const bool in_round = past <= block;  // no: I took a pair of it
    work = turns + past + (in_round ? 0 : blocks - 2 * block - 1);
    step = in_round ? 2 * (blocks - block) - 1 : 2 * block + 1;
  }
};

}  // namespace tessera
