#include "distributed/model.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "distributed/band.hpp"

namespace tessera::distributed {
namespace {

constexpr double kPerGiga_us = 1e-3;  // microseconds per operation at 1 Giga-operation per second is 1e-3

double microseconds(double bytes, double gbps) { return bytes / gbps * kPerGiga_us; }

// The time of the matrix products alone: two forward, five backward.
double products_us(const tessera_ranks_problem& p, double area, double heads_q) {
  const bool backward = p.direction == TESSERA_BACKWARD;
  const double flops = 2.0 * static_cast<double>(p.head_dim + p.head_dim_v) * area * heads_q *
                       static_cast<double>(p.batch) * (backward ? 2.5 : 1.0);
  return flops / (backward ? p.tflops_backward : p.tflops_forward) * 1e-6;
}

constexpr int64_t kApart = int64_t{1} << 32;  // of the rows of two sequences or chunks

// Rows of several ranges, each counted once.
int64_t count(std::vector<Range> ranges) {
  int64_t rows = 0;
  for (const Range& range : united(std::move(ranges))) rows += range.length();
  return rows;
}

// Device-memory traffic of one rank beside the kernels' own: what executes the lists does it.
class Traffic {
 public:
  Traffic(const tessera_ranks_problem& p, const std::vector<tessera_chunk>& chunks, const Mesh& mesh, int32_t rank,
          const Schedule& s)
      : p_(p), chunks_(chunks), s_(s), rank_(rank) {
    const auto heads_q = static_cast<double>(mesh.heads_q(rank).count);
    const auto heads_kv = static_cast<double>(mesh.heads_kv(rank).count), d = static_cast<double>(p.head_dim);
    const auto batch = static_cast<double>(p.batch), d_v = static_cast<double>(p.head_dim_v);
    o_row_ = batch * heads_q * d_v, keys_row_ = batch * heads_kv * (d + d_v);
    std::vector<Range> all;
    int64_t of_steps = 0;
    for (const tessera_rank_step& step : s.steps) {
      const std::vector<Range> of_step = rows(step, &tessera_rank_pair::q_begin, &tessera_rank_pair::q_length);
      of_steps += count(of_step);
      all.insert(all.end(), of_step.begin(), of_step.end());
      if (step.num_pairs > 0) last_ = &step;
    }
    rows_ = count(std::move(all));
    merges_ = of_steps > rows_;
  }

  double bytes(const tessera_rank_step& step) const {
    return of_transfers(step) + (p_.direction == TESSERA_BACKWARD ? of_sums(step) : of_partials(step)) + joined(step);
  }

 private:
  // The queries or the keys of a step's pairs; those of different sequences are far apart.
  std::vector<Range> rows(const tessera_rank_step& step, int64_t tessera_rank_pair::*begin,
                          int64_t tessera_rank_pair::*length) const {
    std::vector<Range> rows;
    for (int64_t i = step.first_pair; i < step.first_pair + step.num_pairs; ++i) {
      const tessera_rank_pair& pair = s_.pairs[static_cast<size_t>(i)];
      const int64_t first = pair.sequence * kApart + pair.*begin;
      rows.push_back({first, first + pair.*length});
    }
    return rows;
  }
  int64_t group(int32_t rank) const { return rank / p_.head_ranks; }

  // Heads are copied for an exchange and out of it, and so are this rank's own. Received sums are added to its own.
  double of_transfers(const tessera_rank_step& step) const {
    double bytes = 0, exchanged = 0;
    for (int64_t t = step.first_transfer; t < step.first_transfer + step.num_transfers; ++t) {
      const tessera_rank_transfer& transfer = s_.transfers[static_cast<size_t>(t)];
      if (transfer.partial && transfer.receive) bytes += 3.0 * static_cast<double>(transfer.bytes);
      if (group(transfer.peer) == group(rank_)) exchanged += static_cast<double>(transfer.bytes);
    }
    return bytes + 2.0 * exchanged + (p_.head_ranks > 1 ? exchanged / (p_.head_ranks - 1) : 0);
  }
  // Forward, rows of several steps are summed in float32: a part is written, read, and added to the sum, which begins
  // with 0 and is rounded at the end.
  double of_partials(const tessera_rank_step& step) const {
    if (!merges_) return 0;
    const double parts =
        16.0 * static_cast<double>(count(rows(step, &tessera_rank_pair::q_begin, &tessera_rank_pair::q_length)));
    return o_row_ * (parts + (&step == last_ ? 10.0 * static_cast<double>(rows_) : 0));
  }
  // Backward, dK and dV are sums that begin with 0, to which each call adds; this rank's are rounded at the end.
  double of_sums(const tessera_rank_step& step) const {
    const int64_t keys = count(rows(step, &tessera_rank_pair::k_begin, &tessera_rank_pair::k_length));
    return keys_row_ * (12.0 * static_cast<double>(keys) + (&step == last_ ? 6.0 * static_cast<double>(rows_) : 0));
  }
  // Keys of several ranks are joined for one call.
  double joined(const tessera_rank_step& step) const {
    std::vector<Range> chunks;
    bool several = false;
    for (int64_t i = step.first_pair; i < step.first_pair + step.num_pairs; ++i) {
      const tessera_rank_pair& pair = s_.pairs[static_cast<size_t>(i)];
      for (int64_t c = pair.k_chunk; c < pair.k_chunk + pair.k_chunks; ++c) {
        chunks.push_back({c * kApart, c * kApart + chunk(c).length});
        several |= group(chunk(c).rank) != group(chunk(pair.k_chunk).rank);
      }
    }
    const double elements = keys_row_ * static_cast<double>(several ? count(std::move(chunks)) : 0);
    return 2.0 * elements * static_cast<double>(tessera_dtype_bytes(p_.dtype));
  }
  const tessera_chunk& chunk(int64_t c) const { return chunks_[static_cast<size_t>(c)]; }

  const tessera_ranks_problem& p_;
  const std::vector<tessera_chunk>& chunks_;
  const Schedule& s_;
  int32_t rank_;
  double o_row_, keys_row_;  // elements of a row of O, and of K and V
  int64_t rows_ = 0;
  bool merges_ = false;                      // forward: some row is computed in several steps
  const tessera_rank_step* last_ = nullptr;  // that computes
};

// The greater of the times of sending and receiving, each over its own link.
double exchange_us(const tessera_ranks_problem& p, int32_t rank, const Schedule& s, const tessera_rank_step& step) {
  double us[2] = {};
  for (int64_t t = step.first_transfer; t < step.first_transfer + step.num_transfers; ++t) {
    const tessera_rank_transfer& transfer = s.transfers[static_cast<size_t>(t)];
    const bool same_host = transfer.peer / p.ranks_per_host == rank / p.ranks_per_host;
    us[transfer.receive] += microseconds(static_cast<double>(transfer.bytes), same_host ? p.link_gbps : p.network_gbps);
  }
  return step.num_transfers == 0 ? 0 : std::max(us[0], us[1]) + p.step_us;
}

}  // namespace

void add_times(const tessera_ranks_problem& p, const std::vector<tessera_chunk>& chunks, const Mesh& mesh, int32_t rank,
               Schedule& s) {
  const Traffic traffic(p, chunks, mesh, rank, s);
  const double heads_q = mesh.heads_q(rank).count;
  for (tessera_rank_step& step : s.steps) {
    step.compute_us =
        products_us(p, static_cast<double>(step.area), heads_q) + microseconds(traffic.bytes(step), p.memory_gbps);
    step.exchange_us = exchange_us(p, rank, s, step);
  }
}

Prediction predict(const tessera_ranks_problem& p, const std::vector<tessera_chunk>& chunks, const Mesh& mesh) {
  struct Step {
    double compute_us, exchange_us;
    size_t first_peer, num_peers;
  };
  Prediction result;
  std::vector<std::vector<Step>> steps(static_cast<size_t>(p.ranks));
  std::vector<std::vector<int32_t>> peers(static_cast<size_t>(p.ranks));
  double all_area = 0;
  for (int32_t rank = 0; rank < p.ranks; ++rank) {
    const auto r = static_cast<size_t>(rank);
    const Heads heads = mesh.heads_q(rank);
    Schedule schedule = mesh.schedule(rank);
    add_times(p, chunks, mesh, rank, schedule);
    double sent = 0, area = 0;
    for (const tessera_rank_step& step : schedule.steps) {
      const size_t first = peers[r].size();
      for (int64_t t = 0; t < step.num_transfers; ++t) {
        const int32_t peer = schedule.transfers[static_cast<size_t>(step.first_transfer + t)].peer;
        if (peers[r].size() == first || peers[r].back() != peer) peers[r].push_back(peer);
      }
      steps[r].push_back({step.compute_us, step.exchange_us, first, peers[r].size() - first});
      sent += static_cast<double>(step.sent_bytes);
      area += static_cast<double>(step.area);
    }
    area *= static_cast<double>(heads.count) / static_cast<double>(p.heads_q);
    all_area += area;
    result.sent_bytes = std::max(result.sent_bytes, sent);
    result.largest_area = std::max(result.largest_area, area);
    result.steps = static_cast<int32_t>(schedule.steps.size());
  }
  const auto heads_q = static_cast<double>(p.heads_q);
  result.compute_us = products_us(p, result.largest_area, heads_q);
  result.ideal_us = products_us(p, all_area / p.ranks, heads_q);

  std::vector<double> now(static_cast<size_t>(p.ranks), p.ranks > 1 ? p.step_us : 0), next(now);
  for (size_t n = 0; n < static_cast<size_t>(result.steps); ++n) {
    for (size_t r = 0; r < now.size(); ++r) {
      const Step& step = steps[r][n];
      double together = now[r];
      for (size_t i = 0; i < step.num_peers; ++i) {
        together = std::max(together, now[static_cast<size_t>(peers[r][step.first_peer + i])]);
      }
      const double under = p.overlap_loss * std::min(step.exchange_us, step.compute_us);
      next[r] = std::max(now[r] + step.compute_us + under, step.num_peers ? together + step.exchange_us : 0);
    }
    now.swap(next);
  }
  result.predicted_us = *std::max_element(now.begin(), now.end());
  return result;
}

}  // namespace tessera::distributed
