#include "cells.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "attention.hpp"
#include "memory.hpp"
#include "peers/ceilings.hpp"
#include "serving.hpp"
#include "standard.hpp"

namespace bench {
namespace {

// A call has enough heads and sequences for so many FLOPs, so that it takes at least 10 ms on today's CPUs.
constexpr double kFlopsPerCall = 2.5e9;
constexpr int64_t kHeadsAtMost = 8;

constexpr double kGiga = 1e9;

// ---- names -------------------------------------------------------------------------------------------------------

const char* short_name(int32_t dtype) {
  switch (dtype) {
    case TESSERA_FLOAT32:
      return "f32";
    case TESSERA_FLOAT16:
      return "f16";
    default:
      return "bf16";
  }
}

const char* short_name(tessera_direction direction) { return direction == TESSERA_FORWARD ? "fwd" : "bwd"; }

std::string size_name(int64_t seqlen, int64_t head_dim) {
  return "N" + std::to_string(seqlen) + "/D" + std::to_string(head_dim);
}

// ---- shapes and contests -----------------------------------------------------------------------------------------

// Self-attention with enough heads and sequences for a call that can be timed.
Shape self_attention(tessera_direction direction, int32_t dtype, int64_t seqlen, int64_t head_dim, bool causal) {
  Shape shape;
  shape.direction = direction;
  shape.dtype = dtype;
  shape.seqlen_q = shape.seqlen_k = seqlen;
  shape.head_dim = head_dim;
  shape.causal = causal;
  const double flops_per_call = dtype == TESSERA_BFLOAT16 ? 2 * kFlopsPerCall : kFlopsPerCall;
  const auto repeats = static_cast<int64_t>(std::ceil(flops_per_call / attention_flops(shape)));
  shape.heads_q = shape.heads_kv = std::min(repeats, kHeadsAtMost);
  shape.batch = (repeats + shape.heads_q - 1) / shape.heads_q;
  return shape;
}

tessera_device with_threads(tessera_device device, int threads) {
  device.threads = threads;
  return device;
}

Clock clock_for(const Settings& settings, int threads) { return threads == 1 ? settings.clock : Clock::kWall; }

Sampler attention_sampler(Shape shape, const tessera_device& device, const Settings& settings, double work) {
  shape.heads_first = settings.heads_first;
  auto attention = std::make_shared<Attention>(shape, device, settings.seed);
  return timed([attention] { attention->run(); }, work, clock_for(settings, device.threads));
}

Sampler peak_sampler(int32_t dtype, int32_t isa) {
  return [dtype, isa] {
    const double gflops =
        tessera::peers::peak_gflops(static_cast<tessera_dtype>(dtype), static_cast<tessera_isa>(isa), 1);
    if (gflops <= 0) throw Unavailable("this CPU lacks " + std::string(tessera_isa_name(isa)));
    return gflops * kGiga;
  };
}

// One thread, over the peak.
Contest against_peak(const Settings& settings, const Shape& shape, std::optional<tessera_isa> isa) {
  tessera_device device = with_threads(settings.device, 1);
  if (isa) {
    if (*isa > device.isa_limit) throw Unavailable("this CPU lacks " + std::string(tessera_isa_name(*isa)));
    device.isa = *isa;
  }
  const double flops = attention_flops(shape);
  return {attention_sampler(shape, device, settings, flops), peak_sampler(shape.dtype, device.isa),
          clock_for(settings, 1)};
}

// The same against AMX's products of numbers, not of zeros.
Contest against_amx_on_numbers(const Settings& settings, const Shape& shape) {
  const tessera_device device = with_threads(settings.device, 1);
  const Sampler ceiling = [] {
    const double gflops = tessera::peers::amx_gflops(1, false);
    if (gflops <= 0) throw Unavailable("this process may not use AMX");
    return gflops * kGiga;
  };
  return {attention_sampler(shape, device, settings, attention_flops(shape)), ceiling, clock_for(settings, 1)};
}

// One shape against another, both on one thread, each by its own visible area.
Contest against_shape(const Settings& settings, const Shape& shape, const Shape& reference) {
  const tessera_device device = with_threads(settings.device, 1);
  const double flops = attention_flops(shape);
  return {attention_sampler(shape, device, settings, flops),
          attention_sampler(reference, device, settings, attention_flops(reference)), clock_for(settings, 1)};
}

// All threads against one, by wall time.
Contest against_one_thread(const Settings& settings, const Shape& shape) {
  const double flops = attention_flops(shape);
  Settings wall = settings;
  wall.clock = Clock::kWall;
  return {attention_sampler(shape, settings.device, wall, flops),
          attention_sampler(shape, with_threads(settings.device, 1), wall, flops)};
}

// AMX's tiles against the kernel that serves the shape without them, both on one thread.
Contest against_vectors(const Settings& settings, const Shape& shape) {
  tessera_device tiles = with_threads(settings.device, 1), vectors = tiles;
  tiles.vector_isa = 0;
  tiles.kernel = TESSERA_KERNEL_TILED;
  vectors.isa = settings.device.vector_isa;
  const double flops = attention_flops(shape);
  return {attention_sampler(shape, tiles, settings, flops), attention_sampler(shape, vectors, settings, flops),
          clock_for(settings, 1)};
}

Contest against_standard(const Settings& settings, const Shape& shape) {
  auto attention = std::make_shared<Attention>(shape, with_threads(settings.device, 1), settings.seed);
  auto standard = std::make_shared<StandardPeer>(shape, *attention, 1);
  const double flops = attention_flops(shape);
  const Clock clock = clock_for(settings, 1);
  return {timed([attention] { attention->run(); }, flops, clock),
          timed([attention, standard] { standard->run(); }, flops, clock), clock};
}

// ---- groups ------------------------------------------------------------------------------------------------------

struct ShareRow {
  const char* prefix;  // before the direction, "" or "avx2/"
  tessera_direction direction;
  int32_t dtype;
  std::optional<tessera_isa> isa;
  // Thresholds full and causal. 0: for information.
  std::pair<double, double> long_d128, long_d64, short_n512;
};

constexpr ShareRow kShareRows[] = {
    {"", TESSERA_FORWARD, TESSERA_FLOAT32, {}, {0.90, 0.85}, {0.88, 0.82}, {0.82, 0.70}},
    {"", TESSERA_FORWARD, TESSERA_BFLOAT16, {}, {0.80, 0.76}, {0.76, 0.70}, {0.68, 0.58}},
    {"", TESSERA_BACKWARD, TESSERA_FLOAT32, {}, {0.86, 0.82}, {0.86, 0.82}, {0.74, 0.64}},
    {"", TESSERA_BACKWARD, TESSERA_BFLOAT16, {}, {0, 0}, {0, 0}, {0, 0}},
    {"avx2/", TESSERA_FORWARD, TESSERA_FLOAT32, TESSERA_ISA_AVX2, {0.85, 0}, {0.82, 0}, {0.75, 0}},
};
// By AMX, where the same names are relative to its peak.
constexpr ShareRow kAmxRow = {"", TESSERA_FORWARD, TESSERA_BFLOAT16, {}, {0.46, 0.40}, {0.42, 0.35}, {0.33, 0.26}};

constexpr std::pair<int64_t, int64_t> kSizes[] = {{512, 64}, {512, 128}, {2048, 64}, {2048, 128}, {8192, 128}};

void add_shares(std::vector<Cell>& cells, const tessera_device& device) {
  for (const ShareRow& row : kShareRows) {
    // The bf16 thresholds are for the dot-product instruction; AMX has its own.
    const bool amx = row.dtype == TESSERA_BFLOAT16 && device.isa == TESSERA_ISA_AMX_BF16;
    const bool judged = row.dtype != TESSERA_BFLOAT16 || amx || device.isa == TESSERA_ISA_AVX512_BF16;
    const ShareRow& limits = amx && row.direction == TESSERA_FORWARD ? kAmxRow : row;
    for (const auto& [seqlen, head_dim] : kSizes) {
      const auto& pair = seqlen < 2048 ? limits.short_n512 : head_dim < 128 ? limits.long_d64 : limits.long_d128;
      for (const bool causal : {false, true}) {
        const Shape shape = self_attention(row.direction, row.dtype, seqlen, head_dim, causal);
        cells.push_back({.group = "One thread, share of the peak",
                         .name = std::string(row.prefix) + short_name(row.direction) + "/" + short_name(row.dtype) +
                                 "/" + size_name(seqlen, head_dim) + (causal ? "/causal" : "/full"),
                         .against = "peak",
                         .threshold = judged ? (causal ? pair.second : pair.first) : 0,
                         .make = [=, isa = row.isa](const Settings& s) { return against_peak(s, shape, isa); }});
        if (!amx) continue;
        cells.push_back({.group = "One thread, share of AMX's products of numbers",
                         .name = std::string("amx-numbers/") + short_name(row.direction) + "/bf16/" +
                                 size_name(seqlen, head_dim) + (causal ? "/causal" : "/full"),
                         .against = "products",
                         .threshold = 0,
                         .make = [=](const Settings& s) { return against_amx_on_numbers(s, shape); }});
      }
    }
  }
}

void add_head_sizes(std::vector<Cell>& cells) {
  struct Row {
    tessera_direction direction;
    int32_t dtype;
    double threshold;
  };
  for (const Row row : {Row{TESSERA_FORWARD, TESSERA_FLOAT32, 0.75}, Row{TESSERA_FORWARD, TESSERA_BFLOAT16, 0},
                        Row{TESSERA_BACKWARD, TESSERA_FLOAT32, 0}, Row{TESSERA_BACKWARD, TESSERA_BFLOAT16, 0}}) {
    for (const int64_t head_dim : {40, 80, 96, 112, 160, 192, 256, 512}) {
      const Shape shape = self_attention(row.direction, row.dtype, 2048, head_dim, false);
      cells.push_back({.group = "Head sizes off the grid, one thread, share of the peak",
                       .name = std::string("heads/") + short_name(row.direction) + "/" + short_name(row.dtype) + "/" +
                               size_name(2048, head_dim),
                       .against = "peak",
                       .threshold = row.threshold,
                       .make = [=](const Settings& s) { return against_peak(s, shape, {}); }});
    }
  }
}

// A batch of many different lengths whose products take about as long as `like`'s.
Shape packed_like(Shape like) {
  const int64_t tokens = like.batch * like.seqlen_q * 2;
  like.packed = {37, 1031, 512, 129, 2048, 300, 771, 1500, 64, 911};
  int64_t total = std::accumulate(like.packed.begin(), like.packed.end(), int64_t{0});
  for (size_t next = 0; total < tokens; ++next) total += like.packed.emplace_back(like.packed[next]);
  return like;
}

void add_options(std::vector<Cell>& cells) {
  struct Option {
    const char* name;
    double threshold;
    void (*apply)(Shape&);
  };
  constexpr double kFree = 0.90, kCheap = 0.75;  // of the plain call's rate, on the visible area
  static constexpr Option kOptions[] = {
      {"causal", kFree, [](Shape& s) { s.causal = true; }},
      {"window", kFree,
       [](Shape& s) {
         s.causal = true;
         s.window_left = 1023;
       }},
      {"packed", kFree, [](Shape& s) { s = packed_like(s); }},
      {"gqa", kFree,
       [](Shape& s) {
         s.heads_q = 8;
         s.heads_kv = 2;
       }},
      {"bias", kCheap, [](Shape& s) { s.bias = true; }},
      {"alibi", kCheap, [](Shape& s) { s.alibi = true; }},
      {"softcap", kCheap, [](Shape& s) { s.softcap = 30; }},
      {"sink", kCheap, [](Shape& s) { s.sink = true; }},
      {"dropout", kCheap, [](Shape& s) { s.dropout_p = 0.1; }},
  };
  struct Row {
    tessera_direction direction;
    int32_t dtype;
    int64_t head_dim;
  };
  for (const Row row : {Row{TESSERA_FORWARD, TESSERA_FLOAT32, 64}, Row{TESSERA_FORWARD, TESSERA_FLOAT32, 128},
                        Row{TESSERA_FORWARD, TESSERA_BFLOAT16, 64}, Row{TESSERA_FORWARD, TESSERA_BFLOAT16, 128},
                        Row{TESSERA_BACKWARD, TESSERA_FLOAT32, 128}, Row{TESSERA_BACKWARD, TESSERA_BFLOAT16, 64},
                        Row{TESSERA_BACKWARD, TESSERA_BFLOAT16, 128}}) {
    const Shape plain = self_attention(row.direction, row.dtype, 2048, row.head_dim, false);
    for (const Option& option : kOptions) {
      Shape shape = plain;
      option.apply(shape);
      if (shape.window_left >= 0) shape.seqlen_q = shape.seqlen_k = 4096;
      cells.push_back({.group = "Options, one thread, against the plain call on the visible area",
                       .name = std::string("options/") + short_name(row.direction) + "/" + short_name(row.dtype) +
                               "/D" + std::to_string(row.head_dim) + "/" + option.name,
                       .against = "plain",
                       .threshold = option.threshold,
                       .is_share = false,
                       .make = [=](const Settings& s) { return against_shape(s, shape, plain); }});
    }
  }
}

void add_dtypes(std::vector<Cell>& cells, const tessera_device& device) {
  struct Row {
    tessera_direction direction;
    int32_t dtype;
    double threshold;
  };
  const double bf16 = device.isa == TESSERA_ISA_AVX512_BF16 ? 1.4 : 0;
  for (const Row row : {Row{TESSERA_BACKWARD, TESSERA_BFLOAT16, bf16}, Row{TESSERA_FORWARD, TESSERA_FLOAT16, 0.9},
                        Row{TESSERA_BACKWARD, TESSERA_FLOAT16, 0.9}}) {
    for (const int64_t head_dim : {64, 128}) {
      for (const bool causal : {false, true}) {
        const Shape reference = self_attention(row.direction, TESSERA_FLOAT32, 2048, head_dim, causal);
        Shape shape = reference;
        shape.dtype = row.dtype;
        cells.push_back({.group = "Data types, one thread, against float32",
                         .name = std::string("dtype/") + short_name(row.direction) + "/" + short_name(row.dtype) + "/" +
                                 size_name(2048, head_dim) + (causal ? "/causal" : "/full"),
                         .against = "float32",
                         .threshold = row.threshold,
                         .is_share = false,
                         .make = [=](const Settings& s) { return against_shape(s, shape, reference); }});
      }
    }
  }
}

// The border of the plan's choice between AMX's tiles and the vectors (src/cpu/schedule.cpp): the threshold is 1 where
// the plan chooses tiles, and none elsewhere.
void add_tiles(std::vector<Cell>& cells, const tessera_device& device) {
  if (device.vector_isa == 0) return;
  const auto add = [&](const std::string& name, const Shape& shape, bool chosen) {
    cells.push_back({.group = "AMX's tiles, one thread, against the vectors",
                     .name = "tiles/" + name,
                     .against = "vectors",
                     .threshold = chosen ? 1.0 : 0,
                     .is_share = false,
                     .make = [=](const Settings& s) { return against_vectors(s, shape); }});
  };
  constexpr int64_t kLeastLength = 128, kLeastHeadDim = 8;
  for (const auto direction : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
    for (const int64_t head_dim : {8, 16, 24, 32, 64, 128, 256, 512}) {
      for (const int64_t seqlen : {32, 64, 128, 256, 512}) {
        if (head_dim != 64 && head_dim != 128 && seqlen != kLeastLength && seqlen != 512) continue;
        for (const bool causal : {false, true}) {
          add(short_name(direction) + ("/bf16/" + size_name(seqlen, head_dim)) + (causal ? "/causal" : "/full"),
              self_attention(direction, TESSERA_BFLOAT16, seqlen, head_dim, causal),
              seqlen >= kLeastLength && head_dim >= kLeastHeadDim);
        }
      }
    }
  }
  // Few query rows against many keys: 8 heads over one.
  for (const int64_t queries : {1, 2, 4, 8, 16, 31}) {
    Shape shape = self_attention(TESSERA_FORWARD, TESSERA_BFLOAT16, 1, 128, false);
    shape.seqlen_q = queries, shape.seqlen_k = 32768;
    shape.batch = 1, shape.heads_q = 8, shape.heads_kv = 1;
    add("rows" + std::to_string(8 * queries) + "/bf16/D128", shape, 8 * queries >= kLeastLength);
  }
}

void add_threads(std::vector<Cell>& cells, const tessera_device& device) {
  const double threshold = 0.975 * device.threads;  // 1.95 of 2
  for (const auto direction : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
    for (const auto& [seqlen, head_dim] : {std::pair<int64_t, int64_t>{512, 64}, {2048, 128}}) {
      for (const bool causal : {false, true}) {
        Shape shape = self_attention(direction, TESSERA_FLOAT32, seqlen, head_dim, causal);
        shape.batch *= 2;
        cells.push_back({.group = "All threads against one",
                         .name = std::string("threads/") + short_name(direction) + "/f32/" +
                                 size_name(seqlen, head_dim) + (causal ? "/causal" : "/full"),
                         .against = "one thread",
                         .threshold = threshold,
                         .is_share = false,
                         .make = [=](const Settings& s) { return against_one_thread(s, shape); }});
      }
    }
  }
}

void add_standard(std::vector<Cell>& cells) {
  for (const auto direction : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
    for (const auto& [seqlen, head_dim] : kSizes) {
      for (const bool causal : {false, true}) {
        const Shape shape = self_attention(direction, TESSERA_FLOAT32, seqlen, head_dim, causal);
        cells.push_back({.group = "One thread, against standard attention on OpenBLAS",
                         .name = std::string("standard/") + short_name(direction) + "/f32/" +
                                 size_name(seqlen, head_dim) + (causal ? "/causal" : "/full"),
                         .against = "standard",
                         .threshold = causal ? 2.0 : 1.2,
                         .is_share = false,
                         .make = [=](const Settings& s) { return against_standard(s, shape); }});
      }
    }
  }
}

void add_memory(std::vector<Cell>& cells) {
  for (const auto direction : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
    for (const int64_t heads : {1, 8}) {
      Shape shape;
      shape.direction = direction;
      shape.seqlen_q = shape.seqlen_k = 8192;
      shape.heads_q = shape.heads_kv = heads;
      cells.push_back({.group = "Memory beyond inputs and outputs, all threads: standard attention's over Tessera's",
                       .name = std::string("memory/") + short_name(direction) + "/f32/" + size_name(8192, 64) + "/H" +
                               std::to_string(heads),
                       .against = "standard",
                       .threshold = 100,
                       .is_share = false,
                       .unit = Unit::kInverseMemory,
                       .repetitions = 1,
                       .make = [=](const Settings& s) { return memory_contest(s, shape); }});
    }
  }
}

// One new token of a long conversation: keys and values are read once, and nothing else costs.
void add_decode(std::vector<Cell>& cells) {
  for (const int32_t dtype : {TESSERA_FLOAT32, TESSERA_BFLOAT16}) {
    Shape shape;
    shape.dtype = dtype;
    shape.seqlen_q = 1;
    shape.seqlen_k = 32768;
    shape.heads_q = 32;
    shape.heads_kv = 8;
    shape.head_dim = 128;
    cells.push_back({.group = "Decoding, all threads, share of the memory's read bandwidth",
                     .name = std::string("decode/") + short_name(dtype) + "/N32768/D128/gqa32:8",
                     .against = "memory read",
                     .threshold = 0.90,
                     .unit = Unit::kBytes,
                     .make = [=](const Settings& s) {
                       const double bytes = kv_bytes(shape);
                       const int threads = s.device.threads;
                       const auto bytes_per_thread = static_cast<int64_t>(bytes) / threads;
                       return Contest{attention_sampler(shape, s.device, s, bytes),
                                      [=] { return kGiga * tessera::peers::read_gbps(bytes_per_thread, threads); }};
                     }});
  }
}

// An engine's step: 16 sequences that decode and one with a chunk of its prompt, in one call, against two separate
// calls.
Contest mixed_against_apart(const Settings& settings, const StepShape& decoding, const StepShape& prefill) {
  StepShape mixed = decoding;
  const auto middle = mixed.new_tokens.begin() + static_cast<int64_t>(mixed.new_tokens.size() / 2);
  mixed.new_tokens.insert(middle, prefill.new_tokens.begin(), prefill.new_tokens.end());
  const auto step = [&](const StepShape& shape) {
    return std::make_shared<ServingStep>(shape, with_threads(settings.device, 1), settings.seed);
  };
  const double flops = step_flops(mixed);
  const Clock clock = clock_for(settings, 1);
  const auto run_apart = [first = step(decoding), second = step(prefill)] {
    first->run();
    second->run();
  };
  return {timed([together = step(mixed)] { together->run(); }, flops, clock), timed(run_apart, flops, clock), clock};
}

void add_serving(std::vector<Cell>& cells) {
  constexpr double kNoSlowerThanApart = 1 / 1.05;
  constexpr int64_t kDecoding = 16;
  for (const int32_t dtype : {TESSERA_FLOAT32, TESSERA_BFLOAT16}) {
    for (const int64_t chunk : {32, 256}) {
      StepShape decoding;
      decoding.dtype = dtype;
      StepShape prefill = decoding;
      decoding.new_tokens.assign(kDecoding, 1);
      prefill.new_tokens = {chunk};
      cells.push_back({.group = "Mixed batches, one thread, against decoding and a chunk of a prompt apart",
                       .name = std::string("mixed/") + short_name(dtype) + "/" + std::to_string(kDecoding) + "x1+" +
                               std::to_string(chunk) + "/N1024/D128/gqa32:8",
                       .against = "apart",
                       .threshold = kNoSlowerThanApart,
                       .is_share = false,
                       .make = [=](const Settings& s) { return mixed_against_apart(s, decoding, prefill); }});
    }
  }
}

}  // namespace

std::vector<Cell> all_cells(const tessera_device& device) {
  std::vector<Cell> cells;
  add_shares(cells, device);
  add_dtypes(cells, device);
  add_head_sizes(cells);
  add_tiles(cells, device);
  add_options(cells);
  add_threads(cells, device);
  add_standard(cells);
  add_memory(cells);
  add_decode(cells);
  add_serving(cells);
  return cells;
}

}  // namespace bench
