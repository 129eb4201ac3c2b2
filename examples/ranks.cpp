// One sequence on several ranks, which are threads here: each has some of its rows, and computes their attention and
// their gradients exactly as one rank would. On GPUs, ranks_cuda.cpp does the same with one process a GPU.
//
//   g++ -std=c++20 ranks.cpp $(pkg-config --cflags --libs tessera) -pthread -o ranks && ./ranks
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <tessera/distributed.hpp>
#include <tessera/tessera.hpp>
#include <thread>
#include <vector>

namespace {

constexpr std::int64_t S = 1024, H = 4, Hkv = 2, D = 64;
constexpr std::int32_t kRanks = 4;

std::vector<float> wave(std::int64_t size, float step) {
  std::vector<float> values(static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(step * static_cast<float>(i));
  return values;
}

// The largest difference of a rank's rows from those of the whole. chunks: where its rows are in the sequence.
float difference(const std::vector<float>& part, const std::vector<float>& whole, std::int64_t columns,
                 const std::vector<tessera_chunk>& chunks) {
  float largest = 0;
  for (const tessera_chunk& chunk : chunks) {
    for (std::int64_t i = 0; i < chunk.length * columns; ++i) {
      const float a = part[static_cast<std::size_t>(chunk.row * columns + i)];
      largest = std::max(largest, std::fabs(a - whole[static_cast<std::size_t>(chunk.begin * columns + i)]));
    }
  }
  return largest;
}

}  // namespace

int main() try {
  const std::vector<float> q = wave(S * H * D, 0.37f), k = wave(S * Hkv * D, 0.11f), v = wave(S * Hkv * D, 0.23f);
  const std::vector<float> d_o = wave(S * H * D, 0.07f);

  // On one rank, to compare with.
  std::vector<float> o(q.size()), lse(S * H), d_q(q.size()), d_k(k.size()), d_v(v.size());
  tessera::Problem whole;
  whole.q = whole.o = tessera::layout(tessera::float32, {1, S, H, D});
  whole.k = whole.v = tessera::layout(tessera::float32, {1, S, Hkv, D});
  whole.lse = tessera::layout(tessera::float32, {1, H, S});
  whole.causal = true;
  const tessera::Plan forward = tessera::plan(whole);
  std::vector<std::byte> workspace(tessera::workspace_bytes(forward));
  tessera::forward(forward, {.q = q.data(), .k = k.data(), .v = v.data(), .o = o.data(), .lse = lse.data()}, workspace);
  whole.direction = TESSERA_BACKWARD;
  whole.d_o = whole.d_q = whole.q, whole.d_k = whole.d_v = whole.k;
  const tessera::Plan backward = tessera::plan(whole);
  workspace.resize(tessera::workspace_bytes(backward));
  tessera::Buffers buffers{};
  buffers.q = q.data(), buffers.k = k.data(), buffers.v = v.data(), buffers.o = o.data(), buffers.lse = lse.data();
  buffers.d_o = d_o.data(), buffers.d_q = d_q.data(), buffers.d_k = d_k.data(), buffers.d_v = d_v.data();
  tessera::backward(backward, buffers, workspace);

  // On four: each thread is a rank, with its rows alone.
  const std::int64_t lengths[] = {S};
  tessera::RanksProblem problem;
  problem.ranks = kRanks;
  problem.direction = TESSERA_BACKWARD;  // both passes
  problem.dtype = TESSERA_FLOAT32, problem.causal = true;
  problem.lengths = lengths, problem.num_sequences = 1;
  problem.heads_q = H, problem.heads_kv = Hkv, problem.head_dim = D;
  std::printf("%s", tessera::describe(tessera::plan_ranks(problem)).c_str());

  const std::vector<tessera::Communicator> communicators = tessera::thread_communicators(kRanks);
  std::atomic<int> wrong = 0;
  const auto rank_of = [&](std::int32_t rank) {
    const tessera::RanksAttention attention(problem, rank);
    std::vector<tessera_chunk> mine;
    const tessera::RankSchedule schedule(attention.plan(), rank);
    for (const tessera_chunk& chunk : schedule.chunks()) {
      if (chunk.rank == rank) mine.push_back(chunk);
    }
    const auto shard = [&](const std::vector<float>& all, std::int64_t columns) {
      std::vector<float> part;
      for (const tessera_chunk& chunk : mine) {
        const auto begin = all.begin() + chunk.begin * columns;
        part.insert(part.end(), begin, begin + chunk.length * columns);
      }
      return part;
    };
    const std::vector<float> my_q = shard(q, H * D), my_k = shard(k, Hkv * D), my_v = shard(v, Hkv * D);
    const std::vector<float> my_d_o = shard(d_o, H * D);
    std::vector<float> my_o(my_q.size()), my_lse(my_q.size() / D), my_d_q(my_q.size());
    std::vector<float> my_d_k(my_k.size()), my_d_v(my_v.size());
    const std::size_t bytes = attention.workspace_bytes(TESSERA_BACKWARD);
    std::vector<std::byte> my_workspace(std::max(attention.workspace_bytes(TESSERA_FORWARD), bytes));
    const auto saved_bytes = static_cast<std::int64_t>(attention.saved_bytes());
    struct alignas(64) Line {
      std::byte bytes[64];
    };
    std::vector<Line> saved(static_cast<std::size_t>(saved_bytes / 64 + 1));

    tessera::RanksBuffers data{};
    data.q = my_q.data(), data.k = my_k.data(), data.v = my_v.data();
    data.o = my_o.data(), data.lse = my_lse.data(), data.saved = saved.data();
    data.d_o = my_d_o.data(), data.d_q = my_d_q.data(), data.d_k = my_d_k.data(), data.d_v = my_d_v.data();
    const tessera::Communicator& communicator = communicators[static_cast<std::size_t>(rank)];
    attention.forward(communicator, data, my_workspace);
    attention.backward(communicator, data, my_workspace);

    const float largest = std::max({difference(my_o, o, H * D, mine), difference(my_d_q, d_q, H * D, mine),
                                    difference(my_d_k, d_k, Hkv * D, mine), difference(my_d_v, d_v, Hkv * D, mine)});
    std::printf("rank %d: largest difference from one rank %.1e\n", rank, static_cast<double>(largest));
    if (!(largest < 1e-4f)) ++wrong;
  };
  std::vector<std::thread> threads;
  for (std::int32_t rank = 0; rank < kRanks; ++rank) threads.emplace_back(rank_of, rank);
  for (std::thread& thread : threads) thread.join();
  return wrong == 0 ? 0 : 1;
} catch (const tessera::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
