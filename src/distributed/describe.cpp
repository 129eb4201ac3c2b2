// A plan for ranks and a rank's schedule, as text and as JSON.
#include <algorithm>
#include <cinttypes>
#include <string>
#include <vector>

#include "core/status.hpp"
#include "core/text.hpp"
#include "distributed/plan.hpp"

namespace tessera::distributed {
namespace {

using core::bytes_text;
using core::JsonWriter;
using core::print;

std::string ms(double us) { return print("%.3g", us * 1e-3); }

// ---- text -----------------------------------------------------------------------------------------------------------

std::string mask_text(const tessera_ranks_problem& p) {
  const auto side = [](int64_t keys) { return keys < 0 ? std::string("all") : print("%" PRId64, keys); };
  std::string text = p.causal ? "causal" : "full";
  if (p.window_left < 0 && p.window_right < 0) return text;
  return text + ", window " + side(p.window_left) + " left, " + side(p.window_right) + " right";
}

std::string strategy_text(int32_t strategy, int32_t head_ranks) {
  const std::string name = tessera_strategy_name(strategy);
  return strategy == TESSERA_STRATEGY_MESH ? name + print(" of %d", head_ranks) : name;
}

std::string sequences_text(const tessera_ranks_problem& p) {
  if (p.num_sequences == 1) {
    return print("%" PRId64 " sequence%s of %" PRId64 " rows", p.batch, p.batch == 1 ? "" : "s", p.lengths[0]);
  }
  int64_t rows = 0, longest = 0;
  for (int64_t s = 0; s < p.num_sequences; ++s) rows += p.lengths[s], longest = std::max(longest, p.lengths[s]);
  return print("%" PRId64 " packed sequences, %" PRId64 " rows, the longest %" PRId64, p.num_sequences, rows, longest);
}

std::string describe_plan(const tessera_ranks_plan& plan) {
  const tessera_ranks_problem& p = plan.problem;
  const double mean = plan.visible_area / p.ranks;
  std::string text =
      print("ranks      %d, %s: %" PRId64 " rows each, %" PRId64 " chunks in all; %s\n", p.ranks,
            tessera_rank_layout_name(p.layout), plan.rows_per_rank, plan.num_chunks, sequences_text(p).c_str());
  text += print("attention  %s, %s, %s; %" PRId64 " query heads, %" PRId64 " KV heads, head size %" PRId64 "\n",
                p.direction == TESSERA_BACKWARD ? "backward" : "forward", mask_text(p).c_str(),
                tessera_dtype_name(p.dtype), p.heads_q, p.heads_kv, p.head_dim);
  text += print("balance    the busiest rank has %.3f of the mean area\n", mean > 0 ? plan.largest_area / mean : 1.0);
  text += print(
      "predicted  %s ms, %.3f of the ideal, %s ms with no exchange and equal areas (a prediction for GPUs of %g "
      "TFLOP/s, "
      "%g GB/s between ranks of a host, %g between hosts)\n",
      ms(plan.predicted_us).c_str(), plan.predicted_us > 0 ? plan.ideal_us / plan.predicted_us : 1.0,
      ms(plan.ideal_us).c_str(), p.direction == TESSERA_BACKWARD ? p.tflops_backward : p.tflops_forward, p.link_gbps,
      p.network_gbps);
  for (int32_t n = 0; n < plan.num_answers; ++n) {
    const tessera_ranks_answer& answer = plan.answers[n];
    const std::string name = strategy_text(answer.strategy, answer.head_ranks);
    text += print("%s%-12s", n == 0 ? "strategy   " : "           ", name.c_str());
    if (!answer.accepted) {
      text += print("refused: %s\n", answer.reason);
      continue;
    }
    text += print("%s ms predicted: %s; %d step%s, sends %s%s\n", ms(answer.predicted_us).c_str(), answer.reason,
                  answer.steps, answer.steps == 1 ? "" : "s", bytes_text(answer.sent_bytes).c_str(),
                  n == 0 ? "  <- taken" : "");
  }
  return text;
}

std::string run_text(const RankSchedule& all, int64_t chunk, int64_t chunks, Range rows) {
  const tessera_chunk &first = all.chunks[static_cast<size_t>(chunk)],
                      &last = all.chunks[static_cast<size_t>(chunk + chunks - 1)];
  std::string text = chunks == 1 ? print("%" PRId64, chunk) : print("%" PRId64 "-%" PRId64, chunk, chunk + chunks - 1);
  if (rows.begin != first.begin || rows.end != last.begin + last.length) {
    text += print("[%" PRId64 ", %" PRId64 ")", rows.begin, rows.end);
  }
  return text;
}

std::string pair_text(const RankSchedule& all, const tessera_rank_pair& pair) {
  const bool causal = pair.window_left < 0 && pair.window_right == 0;
  const bool masked = pair.window_left >= 0 || pair.window_right >= 0;
  return run_text(all, pair.q_chunk, pair.q_chunks, {pair.q_begin, pair.q_begin + pair.q_length}) + " x " +
         run_text(all, pair.k_chunk, pair.k_chunks, {pair.k_begin, pair.k_begin + pair.k_length}) +
         (causal   ? " causal"
          : masked ? " window"
                   : "");
}

constexpr size_t kMostListed = 4;  // more chunks are counted, not listed

std::string joined(const std::vector<std::string>& texts, const char* plural, const char* separator = ", ") {
  if (texts.size() > kMostListed) return print("%zu %s", texts.size(), plural);
  std::string line;
  for (const std::string& text : texts) line += (line.empty() ? "" : separator) + text;
  return line.empty() ? "-" : line;
}

// "K, V of 0, 7 to 1"
std::string transfers_text(const RankSchedule& all, const tessera_rank_step& step, bool receive) {
  std::vector<std::string> messages, chunks;
  const auto transfer = [&](int64_t n) -> const tessera_rank_transfer& {
    return all.schedule.transfers[static_cast<size_t>(step.first_transfer + n)];
  };
  const tessera_rank_transfer* open = nullptr;
  const auto close = [&] {
    if (!open) return;
    messages.push_back(print("%s of %s %s %d", tessera_travels_name(open->travels), joined(chunks, "chunks").c_str(),
                             receive ? "from" : "to", open->peer));
    chunks.clear();
  };
  for (int64_t n = 0; n < step.num_transfers; ++n) {
    const tessera_rank_transfer& next = transfer(n);
    if ((next.receive != 0) != receive) continue;
    if (open && (open->peer != next.peer || open->travels != next.travels)) close();
    open = &next;
    chunks.push_back(print("%" PRId64, next.chunk));
  }
  close();
  return joined(messages, "messages", "; ");
}

std::string table_text(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t n = 0; n < row.size(); ++n) widths[n] = std::max(widths[n], row[n].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t n = 0; n < row.size(); ++n) line += row[n] + std::string(widths[n] - row[n].size() + 2, ' ');
    text += line.substr(0, line.find_last_not_of(' ') + 1) + '\n';
  }
  return text;
}

std::string describe_rank(const tessera_ranks_plan& plan, int32_t rank) {
  const RankSchedule all = schedule_of(plan, rank);
  std::vector<std::string> own;
  for (size_t c = 0; c < all.chunks.size(); ++c) {
    const tessera_chunk& chunk = all.chunks[c];
    if (chunk.rank != rank) continue;
    const std::string sequence = plan.problem.num_sequences > 1 ? print(" of sequence %d", chunk.sequence) : "";
    own.push_back(
        print("%zu [%" PRId64 ", %" PRId64 ")%s", c, chunk.begin, chunk.begin + chunk.length, sequence.c_str()));
  }
  std::string text = print("rank %d: chunks %s; query heads %d .. %d\n", rank, joined(own, "in all").c_str(),
                           all.heads_q.first, all.heads_q.first + all.heads_q.count - 1);
  std::vector<std::vector<std::string>> rows = {
      {"step", "computes", "area", "ms", "receives", "sends", "MiB in", "MiB out", "ms"}};
  for (size_t n = 0; n < all.schedule.steps.size(); ++n) {
    const tessera_rank_step& step = all.schedule.steps[n];
    std::vector<std::string> pairs;
    for (int64_t i = 0; i < step.num_pairs; ++i) {
      pairs.push_back(pair_text(all, all.schedule.pairs[static_cast<size_t>(step.first_pair + i)]));
    }
    const auto mib = [](int64_t bytes) { return print("%.3g", static_cast<double>(bytes) / (1 << 20)); };
    rows.push_back({print("%zu", n), joined(pairs, "pairs"), print("%" PRId64, step.area), ms(step.compute_us),
                    transfers_text(all, step, true), transfers_text(all, step, false), mib(step.received_bytes),
                    mib(step.sent_bytes), ms(step.exchange_us)});
  }
  return text + table_text(rows);
}

// ---- JSON -----------------------------------------------------------------------------------------------------------

struct Count {
  const char* name;
  int64_t value;
};

void add_counts(JsonWriter& json, std::initializer_list<Count> counts) {
  for (const Count& count : counts) json.add(count.name, count.value);
}

void add_problem(JsonWriter& json, const tessera_ranks_problem& p) {
  json.open("problem", '{');
  json.add("strategy", tessera_strategy_name(p.strategy));
  json.add("layout", tessera_rank_layout_name(p.layout));
  json.add("direction", p.direction == TESSERA_BACKWARD ? "backward" : "forward");
  json.add("dtype", tessera_dtype_name(p.dtype));
  json.add("causal", p.causal != 0);
  add_counts(json, {{"ranks", p.ranks},
                    {"head_ranks", p.head_ranks},
                    {"window_left", p.window_left},
                    {"window_right", p.window_right},
                    {"batch", p.batch},
                    {"heads_q", p.heads_q},
                    {"heads_kv", p.heads_kv},
                    {"head_dim", p.head_dim},
                    {"head_dim_v", p.head_dim_v},
                    {"chunk_rows", p.chunk_rows},
                    {"ranks_per_host", p.ranks_per_host}});
  json.open("lengths", '[');
  for (int64_t s = 0; s < p.num_sequences; ++s) json.add(nullptr, p.lengths[s]);
  json.close(']');
  const struct {
    const char* name;
    double value;
  } model[] = {{"tflops_forward", p.tflops_forward}, {"tflops_backward", p.tflops_backward}, {"link_gbps", p.link_gbps},
               {"network_gbps", p.network_gbps},     {"memory_gbps", p.memory_gbps},         {"step_us", p.step_us},
               {"overlap_loss", p.overlap_loss}};
  for (const auto& [name, value] : model) json.add(name, value);
  json.close('}');
}

void add_answers(JsonWriter& json, const tessera_ranks_plan& plan) {
  json.open("strategies", '[');
  for (int32_t n = 0; n < plan.num_answers; ++n) {
    const tessera_ranks_answer& answer = plan.answers[n];
    json.open(nullptr, '{');
    json.add("strategy", tessera_strategy_name(answer.strategy));
    json.add("head_ranks", answer.head_ranks);
    json.add("accepted", answer.accepted != 0);
    json.add("reason", answer.reason);
    json.add("steps", answer.steps);
    json.add("predicted_us", answer.predicted_us);
    json.add("compute_us", answer.compute_us);
    json.add("sent_bytes", answer.sent_bytes);
    json.close('}');
  }
  json.close(']');
}

void add_step(JsonWriter& json, const Schedule& schedule, const tessera_rank_step& step) {
  json.open(nullptr, '{');
  json.open("pairs", '[');
  for (int64_t n = step.first_pair; n < step.first_pair + step.num_pairs; ++n) {
    const tessera_rank_pair& pair = schedule.pairs[static_cast<size_t>(n)];
    json.open(nullptr, '{');
    add_counts(json, {{"sequence", pair.sequence},
                      {"q_begin", pair.q_begin},
                      {"q_length", pair.q_length},
                      {"k_begin", pair.k_begin},
                      {"k_length", pair.k_length},
                      {"window_left", pair.window_left},
                      {"window_right", pair.window_right},
                      {"q_chunk", pair.q_chunk},
                      {"q_chunks", pair.q_chunks},
                      {"k_chunk", pair.k_chunk},
                      {"k_chunks", pair.k_chunks},
                      {"area", pair.area}});
    json.close('}');
  }
  json.close(']');
  json.open("transfers", '[');
  for (int64_t n = step.first_transfer; n < step.first_transfer + step.num_transfers; ++n) {
    const tessera_rank_transfer& transfer = schedule.transfers[static_cast<size_t>(n)];
    json.open(nullptr, '{');
    json.add("receive", transfer.receive != 0);
    json.add("travels", tessera_travels_name(transfer.travels));
    json.add("partial", transfer.partial != 0);
    add_counts(json, {{"peer", transfer.peer},
                      {"chunk", transfer.chunk},
                      {"first_head", transfer.first_head},
                      {"num_heads", transfer.num_heads},
                      {"bytes", transfer.bytes}});
    json.close('}');
  }
  json.close(']');
  add_counts(json, {{"area", step.area}, {"sent_bytes", step.sent_bytes}, {"received_bytes", step.received_bytes}});
  json.add("compute_us", step.compute_us);
  json.add("exchange_us", step.exchange_us);
  json.close('}');
}

void add_rank(JsonWriter& json, const tessera_ranks_plan& plan, int32_t rank) {
  const RankSchedule all = schedule_of(plan, rank);
  add_counts(json, {{"rank", rank},
                    {"first_head_q", all.heads_q.first},
                    {"num_heads_q", all.heads_q.count},
                    {"first_head_kv", all.heads_kv.first},
                    {"num_heads_kv", all.heads_kv.count}});
  json.open("chunks", '[');
  for (const tessera_chunk& chunk : all.chunks) {
    json.open(nullptr, '{');
    add_counts(json, {{"rank", chunk.rank},
                      {"sequence", chunk.sequence},
                      {"begin", chunk.begin},
                      {"length", chunk.length},
                      {"row", chunk.row}});
    json.close('}');
  }
  json.close(']');
  json.open("steps", '[');
  for (const tessera_rank_step& step : all.schedule.steps) add_step(json, all.schedule, step);
  json.close(']');
}

std::string to_json(const tessera_ranks_plan& plan, int32_t rank) {
  JsonWriter json;
  json.open(nullptr, '{');
  json.add("version", tessera_version());
  json.add("hash", plan.hash);
  json.add("strategy", tessera_strategy_name(plan.problem.strategy));
  add_counts(json, {{"rows_per_rank", plan.rows_per_rank}, {"num_chunks", plan.num_chunks}});
  json.add("visible_area", plan.visible_area);
  json.add("largest_area", plan.largest_area);
  json.add("predicted_us", plan.predicted_us);
  json.add("ideal_us", plan.ideal_us);
  add_answers(json, plan);
  add_problem(json, plan.problem);
  if (rank >= 0) add_rank(json, plan, rank);
  json.close('}');
  return json.take();
}

// Returns 0 if memory runs out: no exception may leave the C interface.
template <class Make>
size_t write(const tessera_ranks_plan* plan, int32_t rank, char* text, size_t size, Make make) {
  if (text && size > 0) text[0] = '\0';
  if (!is_plan(plan) || rank < -1 || rank >= plan->problem.ranks) return 0;
  try {
    return core::copy_out(make(*plan, rank), text, size);
  } catch (...) {
    return 0;
  }
}

}  // namespace
}  // namespace tessera::distributed

size_t tessera_ranks_plan_describe(const tessera_ranks_plan* plan, int32_t rank, char* text, size_t size) {
  return tessera::distributed::write(plan, rank, text, size, [](const tessera_ranks_plan& p, int32_t r) {
    return r < 0 ? tessera::distributed::describe_plan(p) : tessera::distributed::describe_rank(p, r);
  });
}

size_t tessera_ranks_plan_json(const tessera_ranks_plan* plan, int32_t rank, char* text, size_t size) {
  return tessera::distributed::write(plan, rank, text, size, tessera::distributed::to_json);
}
