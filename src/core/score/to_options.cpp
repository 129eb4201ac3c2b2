#include "core/score/to_options.hpp"

#include <algorithm>
#include <cstdint>

#include "core/fields.hpp"
#include "core/geometry.hpp"
#include "core/score/handle.hpp"
#include "core/score/recognised.hpp"

namespace tessera::core::score {
namespace {

// Whether i and q_pos are one number in every sequence.
bool is_square(const tessera_problem& p) {
  if (packed_q(p) || packed_k(p) || paged(p) || present(p.seqused_k) || present(p.places)) return false;
  const Place place = core::place_of(p, p.q.shape[1], p.k.shape[1]);
  return place.total_q == place.total_k;
}

bool has_range(const tessera_problem& p) {
  return p.causal || present(p.causal_seqs) || p.window_left >= 0 || p.window_right >= 0;
}

// Whether causal and windows are measured from the range's position, or can be; and a query sees the key there.
bool can_say(const tessera_problem& p, const PositionRange& range) {
  if (range.low != PositionRange::kNoLow && range.low > 0) return false;
  if (range.high != PositionRange::kNoHigh && range.high < 0) return false;
  const bool top_left = p.alignment == TESSERA_TOP_LEFT;
  return is_square(p) || range.from_q_pos != top_left || (!range.from_q_pos && !has_range(p));
}

void narrow(tessera_problem& p, const PositionRange& range) {
  if (!range.any()) return;
  if (!is_square(p) && !range.from_q_pos) p.alignment = TESSERA_TOP_LEFT;
  const auto least = [](int64_t window, int64_t bound) { return window < 0 ? bound : std::min(window, bound); };
  if (range.low != PositionRange::kNoLow) p.window_left = least(p.window_left, -range.low);
  if (range.high != PositionRange::kNoHigh) p.window_right = least(p.window_right, range.high);
  if (p.window_right == 0 && !present(p.causal_seqs)) p.causal = 1;
}

// The greatest len_q or len_k.
int64_t longest(const tessera_problem& p, const Sizes& size) {
  if (present(p.places)) return kMaxLength;
  const Place place = core::place_of(p, size.max_seqlen_q, size.max_seqlen_k);
  return std::max(place.total_q, place.total_k);
}

// As the table of fields has them: float32, [Hq] or [B, Hq]. A program reads a tensor of the whole, an option the
// part's.
bool can_be_slopes(const tessera_problem& p, int captured) {
  if (p.first_head > 0 || p.total_heads > 0 || p.first_sequence > 0) return false;
  const tessera_layout &layout = p.captured[captured], &gradient = p.d_captured[captured];
  const Sizes size = sizes(p);
  if (layout.dtype != TESSERA_FLOAT32 || (p.direction == TESSERA_BACKWARD && present(gradient))) return false;
  if (layout.rank == 1) return layout.shape[0] == size.heads_q;
  return layout.rank == 2 && layout.shape[0] == size.batch && layout.shape[1] == size.heads_q;
}

}  // namespace

int move_to_options(Program& program, std::span<const Name> tensors, tessera_problem& problem) {
  const Sizes size = sizes(problem);
  Surroundings around{.longest = longest(problem, size),
                      .equal_lengths = is_square(problem),
                      .causal = problem.causal != 0 && (problem.alignment != TESSERA_TOP_LEFT || is_square(problem)),
                      .softcap = problem.softcap != 0,
                      .bias = present(problem.bias),
                      .alibi = present(problem.alibi_slopes),
                      .can_say = [&](const PositionRange& range) { return can_say(problem, range); }};
  for (size_t n = 0; n < program.tensors.size(); ++n) {
    if (!can_be_slopes(problem, place_of(tensors, program.tensors[n]))) around.no_slopes |= 1U << n;
  }
  Recognised recognised = recognise(program, around);
  narrow(problem, recognised.range);
  if (recognised.softcap != 0) problem.softcap = recognised.softcap;
  int slopes = -1;
  if (recognised.slopes >= 0) {
    slopes = place_of(tensors, program.tensors[static_cast<size_t>(recognised.slopes)]);
    problem.alibi_slopes = problem.captured[slopes];
  }
  if (recognised.any()) program = std::move(recognised.rest);
  return slopes;
}

}  // namespace tessera::core::score
