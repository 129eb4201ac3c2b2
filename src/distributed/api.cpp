// The C interface: rules of a problem for ranks, the choice of a strategy, and schedules as a single block of data.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "core/caller_struct.hpp"
#include "core/status.hpp"
#include "distributed/layout.hpp"
#include "distributed/model.hpp"
#include "distributed/plan.hpp"
#include "distributed/schedule.hpp"

namespace tessera::distributed {
namespace {

static_assert(sizeof(tessera_ranks_problem) == offsetof(tessera_ranks_problem, ranks_per_host) + sizeof(int64_t));
static_assert(sizeof(tessera_ranks_problem) % 8 == 0);

constexpr int32_t kMaxRanks = 1024;
constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1;

// ---- rules ----------------------------------------------------------------------------------------------------------

tessera_status check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return ok();
  return invalid("%s: %" PRId64 ", accepted %" PRId64 " .. %" PRId64, name, value, low, high);
}

void fill_in(double& value, double standard) {
  if (value == 0) value = standard;
}

tessera_status check_model(tessera_ranks_problem& p) {
  fill_in(p.tflops_forward, 765);
  fill_in(p.tflops_backward, 590);
  fill_in(p.link_gbps, 237);
  fill_in(p.network_gbps, 45);
  fill_in(p.memory_gbps, 2600);
  fill_in(p.step_us, 200);
  fill_in(p.overlap_loss, 0.1);
  const struct {
    const char* name;
    double value;
  } rates[] = {{"tflops_forward", p.tflops_forward}, {"tflops_backward", p.tflops_backward}, {"link_gbps", p.link_gbps},
               {"network_gbps", p.network_gbps},     {"memory_gbps", p.memory_gbps},         {"step_us", p.step_us}};
  for (const auto& rate : rates) {
    if (!(rate.value > 0) || !std::isfinite(rate.value))
      return invalid("%s: %g, accepted more than 0", rate.name, rate.value);
  }
  if (!(p.overlap_loss >= 0 && p.overlap_loss <= 1))
    return invalid("overlap_loss: %g, accepted 0 .. 1", p.overlap_loss);
  if (p.ranks_per_host == 0) p.ranks_per_host = 8;
  return check_range("ranks_per_host", p.ranks_per_host, 1, kMaxRanks);
}

// The rows must divide over the ranks; the message states what is accepted instead.
tessera_status check_rows(const tessera_ranks_problem& p) {
  int64_t rows = 0;
  for (int64_t s = 0; s < p.num_sequences; ++s) {
    TESSERA_RETURN_IF_ERROR(check_range("lengths", p.lengths[s], 0, kMaxRows));
    rows += p.lengths[s];
    if (rows > kMaxRows) return invalid("lengths: more than %" PRId64 " rows in all, accepted that many", kMaxRows);
  }
  const int64_t parts = p.layout == TESSERA_RANKS_ZIG_ZAG ? 2 * int64_t{p.ranks} : p.ranks;
  if (rows % parts == 0) return ok();
  return invalid("lengths: %" PRId64 " rows do not divide into the %" PRId64
                 " equal chunks of %s over %d ranks; accepted a multiple: "
                 "pad to %" PRId64,
                 rows, parts, tessera_rank_layout_name(p.layout), p.ranks, (rows + parts - 1) / parts * parts);
}

tessera_status check(tessera_ranks_problem& p) {
  TESSERA_RETURN_IF_ERROR(check_range("ranks", p.ranks, 1, kMaxRanks));
  TESSERA_RETURN_IF_ERROR(check_range("strategy", p.strategy, TESSERA_STRATEGY_AUTO, TESSERA_STRATEGY_ALL_GATHER));
  TESSERA_RETURN_IF_ERROR(check_range("layout", p.layout, TESSERA_RANKS_CONTIGUOUS, TESSERA_RANKS_PLANNED));
  TESSERA_RETURN_IF_ERROR(check_range("direction", p.direction, TESSERA_FORWARD, TESSERA_BACKWARD));
  if (p.dtype != TESSERA_FLOAT32 && p.dtype != TESSERA_FLOAT16 && p.dtype != TESSERA_BFLOAT16) {
    return invalid("dtype: %s (%d), accepted float32, float16 and bfloat16", tessera_dtype_name(p.dtype), p.dtype);
  }
  TESSERA_RETURN_IF_ERROR(check_range("causal", p.causal, 0, 1));
  TESSERA_RETURN_IF_ERROR(check_range("reserved_0", p.reserved_0, 0, 0));
  TESSERA_RETURN_IF_ERROR(check_range("window_left", p.window_left, -1, INT64_MAX));
  TESSERA_RETURN_IF_ERROR(check_range("window_right", p.window_right, -1, INT64_MAX));
  p.window_left = std::min(p.window_left, kMaxRows);
  p.window_right = std::min(p.window_right, kMaxRows);
  TESSERA_RETURN_IF_ERROR(check_range("num_sequences", p.num_sequences, 0, kMaxRows));
  if (p.num_sequences > 0 && !p.lengths) return invalid("lengths: NULL, must point to num_sequences int64");
  if (p.batch == 0) p.batch = 1;
  TESSERA_RETURN_IF_ERROR(check_range("batch", p.batch, 1, kMaxRows));
  if (p.batch > 1 && p.num_sequences != 1) {
    return invalid("batch: %" PRId64 " with num_sequences %" PRId64 ", accepted 1: packed sequences are all of a batch",
                   p.batch, p.num_sequences);
  }
  TESSERA_RETURN_IF_ERROR(check_range("heads_kv", p.heads_kv, 1, INT32_MAX));
  TESSERA_RETURN_IF_ERROR(check_range("heads_q", p.heads_q, 1, INT32_MAX));
  if (p.heads_q % p.heads_kv != 0) {
    return invalid("heads_q: %" PRId64 ", must be a multiple of heads_kv: %" PRId64, p.heads_q, p.heads_kv);
  }
  TESSERA_RETURN_IF_ERROR(check_range("head_dim", p.head_dim, 1, 576));
  if (p.head_dim_v == 0) p.head_dim_v = p.head_dim;
  TESSERA_RETURN_IF_ERROR(check_range("head_dim_v", p.head_dim_v, 1, 512));
  if (p.chunk_rows == 0) p.chunk_rows = 128;
  TESSERA_RETURN_IF_ERROR(check_range("chunk_rows", p.chunk_rows, 1, kMaxRows));
  TESSERA_RETURN_IF_ERROR(check_range("head_ranks", p.head_ranks, 0, p.ranks));
  if (p.head_ranks > 0 && p.ranks % p.head_ranks != 0) {
    return invalid("head_ranks: %d, must divide ranks: %d", p.head_ranks, p.ranks);
  }
  TESSERA_RETURN_IF_ERROR(check_model(p));
  return check_rows(p);
}

// ---- choice ---------------------------------------------------------------------------------------------------------

// Why the heads do not divide over `head_ranks` ranks; "" if they do.
std::string refuse_heads(const tessera_ranks_problem& p, int32_t head_ranks) {
  char text[sizeof tessera_ranks_answer::reason] = "";
  if (p.heads_q % head_ranks != 0) {
    std::snprintf(text, sizeof text, "heads_q: %" PRId64 " do not divide over %d ranks", p.heads_q, head_ranks);
  } else if (p.heads_kv % head_ranks != 0 && head_ranks % p.heads_kv != 0) {
    std::snprintf(text, sizeof text, "heads_kv: %" PRId64 ", accepted a multiple or a divisor of %d ranks", p.heads_kv,
                  head_ranks);
  }
  return text;
}

struct Candidate {
  tessera_strategy strategy;
  int32_t head_ranks;
};

std::vector<Candidate> candidates(const tessera_ranks_problem& p) {
  std::vector<Candidate> all = {{TESSERA_STRATEGY_RING, 1}};
  if (p.ranks == 1 && p.strategy == TESSERA_STRATEGY_AUTO) return all;
  all.push_back({TESSERA_STRATEGY_ALL_GATHER, 1});
  all.push_back({TESSERA_STRATEGY_ALL_TO_ALL, p.ranks});
  for (int32_t n = 1; n <= p.ranks; ++n) {
    const bool wanted = p.head_ranks != 0 ? n == p.head_ranks : n > 1 && n < p.ranks;
    if (wanted && p.ranks % n == 0) all.push_back({TESSERA_STRATEGY_MESH, n});
  }
  if (p.strategy == TESSERA_STRATEGY_MESH && all.back().strategy != TESSERA_STRATEGY_MESH) {
    all.push_back({TESSERA_STRATEGY_MESH, 1});  // a prime number of ranks has no other mesh
  }
  return all;
}

tessera_ranks_problem with(const tessera_ranks_problem& p, const tessera_ranks_answer& answer) {
  tessera_ranks_problem chosen = p;
  chosen.strategy = answer.strategy;
  chosen.head_ranks = answer.head_ranks;
  return chosen;
}

tessera_ranks_answer answer_of(const tessera_ranks_problem& p, const Candidate& candidate,
                               const std::vector<tessera_chunk>& chunks, Prediction& prediction) {
  tessera_ranks_answer answer{};
  answer.strategy = candidate.strategy;
  answer.head_ranks = candidate.head_ranks;
  const std::string refused = refuse_heads(p, candidate.head_ranks);
  if (!refused.empty()) {
    std::snprintf(answer.reason, sizeof answer.reason, "%s", refused.c_str());
    return answer;
  }
  const tessera_ranks_problem chosen = with(p, answer);
  prediction = predict(chosen, chunks, Mesh(chosen, chunks));
  answer.accepted = 1;
  answer.steps = prediction.steps;
  answer.predicted_us = prediction.predicted_us;
  answer.compute_us = prediction.compute_us;
  answer.sent_bytes = prediction.sent_bytes;
  const double exposed = std::max(prediction.predicted_us - prediction.compute_us, 0.0);
  std::snprintf(answer.reason, sizeof answer.reason, "%.3g ms of attention on the busiest rank, %.3g ms beside it",
                prediction.compute_us * 1e-3, exposed * 1e-3);
  return answer;
}

// FNV-1a, 64 bits.
uint64_t hash_of(const tessera_ranks_problem& p) {
  uint64_t hash = 14695981039346656037u;
  const auto add = [&hash](const void* data, size_t bytes) {
    for (size_t n = 0; n < bytes; ++n) hash = (hash ^ static_cast<const unsigned char*>(data)[n]) * 1099511628211u;
  };
  tessera_ranks_problem values = p;
  values.lengths = nullptr;
  add(&values, sizeof values);
  add(p.lengths, static_cast<size_t>(p.num_sequences) * sizeof(int64_t));
  return hash;
}

tessera_status make_plan(const tessera_ranks_problem& given, tessera_ranks_plan& plan) {
  tessera_ranks_problem p;
  tessera_ranks_problem_init(&p);
  TESSERA_RETURN_IF_ERROR(core::read_struct("problem", given, offsetof(tessera_ranks_problem, tflops_forward),
                                            "tessera_ranks_problem_init", p));
  p.struct_size = sizeof p;
  TESSERA_RETURN_IF_ERROR(check(p));
  const std::vector<tessera_chunk> chunks = make_chunks(p);
  std::vector<tessera_ranks_answer> answers;
  std::vector<Prediction> predictions;
  for (const Candidate& candidate : candidates(p)) {
    Prediction prediction;
    answers.push_back(answer_of(p, candidate, chunks, prediction));
    predictions.push_back(prediction);
  }
  size_t best = answers.size(), refused = answers.size();
  for (size_t n = 0; n < answers.size(); ++n) {
    const tessera_ranks_answer& answer = answers[n];
    if (p.strategy != TESSERA_STRATEGY_AUTO && answer.strategy != p.strategy) continue;
    if (p.strategy == TESSERA_STRATEGY_AUTO && p.head_ranks != 0 && answer.head_ranks != p.head_ranks) continue;
    if (!answer.accepted)
      refused = n;
    else if (best == answers.size() || answer.predicted_us < answers[best].predicted_us)
      best = n;
  }
  if (best == answers.size()) {
    const char* name = tessera_strategy_name(p.strategy);
    return unsupported("strategy: %s, %s; ring and all_gather take any heads", name,
                       refused < answers.size() ? answers[refused].reason : "no mesh has so many head_ranks");
  }
  tessera_ranks_plan result{};
  const Prediction& prediction = predictions[best];
  result.struct_size = sizeof result;
  result.version = TESSERA_VERSION;
  result.problem = with(p, answers[best]);
  result.hash = hash_of(result.problem);
  for (int64_t s = 0; s < p.num_sequences; ++s) {
    result.rows_per_rank += p.lengths[s];
    const Range all{0, p.lengths[s]};
    const auto visible = cut_to_visible(band_of(p), all, all);
    if (visible) result.visible_area += static_cast<double>(visible_area(band_of(p), *visible));
  }
  result.rows_per_rank /= p.ranks;
  result.num_chunks = static_cast<int64_t>(chunks.size());
  result.largest_area = prediction.largest_area;
  result.predicted_us = prediction.predicted_us;
  result.ideal_us = prediction.ideal_us;
  std::rotate(answers.begin(), answers.begin() + static_cast<std::ptrdiff_t>(best),
              answers.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  result.num_answers = static_cast<int32_t>(std::min(answers.size(), std::size(result.answers)));
  std::copy_n(answers.begin(), result.num_answers, result.answers);
  plan = result;
  return ok();
}

template <class T>
int64_t append(std::vector<char>& block, const std::vector<T>& list) {
  static_assert(sizeof(T) % 8 == 0 && alignof(T) <= 8);
  const auto offset = static_cast<int64_t>(block.size());
  block.resize(block.size() + list.size() * sizeof(T));
  if (!list.empty()) std::memcpy(block.data() + offset, list.data(), list.size() * sizeof(T));
  return offset;
}

}  // namespace

bool is_plan(const tessera_ranks_plan* plan) {
  return plan && plan->struct_size == sizeof *plan && plan->version == TESSERA_VERSION &&
         plan->hash == hash_of(plan->problem);
}

RankSchedule schedule_of(const tessera_ranks_plan& plan, int32_t rank) {
  RankSchedule result;
  result.chunks = make_chunks(plan.problem);
  const Mesh mesh(plan.problem, result.chunks);
  result.heads_q = mesh.heads_q(rank);
  result.heads_kv = mesh.heads_kv(rank);
  result.schedule = mesh.schedule(rank);
  add_times(plan.problem, result.chunks, mesh, rank, result.schedule);
  return result;
}

std::vector<char> block_of(const tessera_ranks_plan& plan, int32_t rank) {
  const RankSchedule all = schedule_of(plan, rank);
  tessera_rank_schedule header{};
  header.struct_size = sizeof header;
  header.hash = plan.hash;
  header.rank = rank;
  header.ranks = plan.problem.ranks;
  header.first_head_q = all.heads_q.first, header.num_heads_q = all.heads_q.count;
  header.first_head_kv = all.heads_kv.first, header.num_heads_kv = all.heads_kv.count;
  header.num_chunks = static_cast<int64_t>(all.chunks.size());
  header.num_steps = static_cast<int64_t>(all.schedule.steps.size());
  header.num_pairs = static_cast<int64_t>(all.schedule.pairs.size());
  header.num_transfers = static_cast<int64_t>(all.schedule.transfers.size());
  std::vector<char> block(sizeof header);
  header.chunks_offset = append(block, all.chunks);
  header.steps_offset = append(block, all.schedule.steps);
  header.pairs_offset = append(block, all.schedule.pairs);
  header.transfers_offset = append(block, all.schedule.transfers);
  header.bytes = block.size();
  std::memcpy(block.data(), &header, sizeof header);
  return block;
}

}  // namespace tessera::distributed

using namespace tessera;

void tessera_ranks_problem_init_sized(tessera_ranks_problem* problem, size_t struct_size) {
  tessera_ranks_problem empty{};
  empty.struct_size = struct_size;
  empty.ranks = 1;
  empty.layout = TESSERA_RANKS_ZIG_ZAG;
  empty.dtype = TESSERA_BFLOAT16;
  empty.window_left = empty.window_right = -1;
  std::memset(static_cast<void*>(problem), 0, struct_size);
  std::memcpy(static_cast<void*>(problem), &empty, std::min(struct_size, sizeof empty));
}

tessera_status tessera_make_ranks_plan(const tessera_ranks_problem* problem, tessera_ranks_plan* plan) {
  if (!problem) return invalid("problem: NULL, must point to a tessera_ranks_problem");
  if (!plan) return invalid("plan: NULL, must point to a tessera_ranks_plan");
  try {
    return distributed::make_plan(*problem, *plan);
  } catch (const std::bad_alloc&) {
    return internal("tessera_make_ranks_plan: not enough memory");
  }
}

size_t tessera_ranks_schedule_bytes(const tessera_ranks_plan* plan, int32_t rank) {
  if (!distributed::is_plan(plan) || rank < 0 || rank >= plan->problem.ranks) return 0;
  try {
    return distributed::block_of(*plan, rank).size();
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

tessera_status tessera_ranks_schedule(const tessera_ranks_plan* plan, int32_t rank, void* memory, size_t bytes) {
  if (!distributed::is_plan(plan))
    return invalid("plan: none of this library's, accepted what tessera_make_ranks_plan made");
  if (rank < 0 || rank >= plan->problem.ranks) {
    return invalid("rank: %d, accepted 0 .. %d", rank, plan->problem.ranks - 1);
  }
  if (!memory || reinterpret_cast<uintptr_t>(memory) % 8 != 0)
    return invalid("memory: %p, must be aligned to 8 bytes", memory);
  try {
    const std::vector<char> block = distributed::block_of(*plan, rank);
    if (bytes < block.size()) return invalid("bytes: %zu, accepted %zu or more", bytes, block.size());
    std::memcpy(memory, block.data(), block.size());
    return ok();
  } catch (const std::bad_alloc&) {
    return internal("tessera_ranks_schedule: not enough memory");
  }
}

namespace {
template <size_t N>
const char* name_of(const char* const (&names)[N], int32_t value) {
  return value >= 0 && value < static_cast<int32_t>(N) ? names[value] : "unknown";
}
}  // namespace

const char* tessera_strategy_name(int32_t strategy) {
  constexpr const char* kNames[] = {"auto", "ring", "all_to_all", "mesh", "all_gather"};
  return name_of(kNames, strategy);
}

const char* tessera_rank_layout_name(int32_t layout) {
  constexpr const char* kNames[] = {"contiguous", "zig_zag", "planned"};
  return name_of(kNames, layout);
}

const char* tessera_travels_name(int32_t travels) {
  constexpr const char* kNames[] = {"Q", "K, V", "O", "dO", "dQ", "dK, dV"};
  return name_of(kNames, travels);
}
