#include "compare_cell.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numbers>
#include <random>

#include "attention_call.hpp"
#include "extents.hpp"
#include "gpu.hpp"
#include "machine.hpp"
#include "peers/loops.hpp"
#include "peers/team.hpp"
#include "program_rows.hpp"

namespace tessera::cli {
namespace {

constexpr Contestant kContestants[] = {{"standard", "standard attention", true}, {"fa1", "first algorithm", false}};

constexpr double kTimeBudgetSeconds = 1.0;  // for the timed calls of one side

// Standard normal numbers in the tensor's dtype, the same for a seed with any number of threads.
void fill_normal(const Tensor& tensor, std::uint64_t seed, peers::Team& team) {
  constexpr std::int64_t kChunk = 1 << 16;
  const std::int64_t elems = tensor.elems();
  const peers::Loops& loops = peers::best_loops();
  team.for_each((elems + kChunk - 1) / kChunk, [&](std::int64_t chunk) {
    const std::int64_t from = chunk * kChunk, count = std::min(kChunk, elems - from);
    std::seed_seq mixed{seed, static_cast<std::uint64_t>(chunk)};
    std::mt19937_64 random(mixed);
    std::vector<float> values(static_cast<std::size_t>(count + 1));
    for (std::int64_t i = 0; i < count; i += 2) {  // Box and Muller: two uniform numbers give two normal ones
      const std::uint64_t bits = random();
      const float radius = std::sqrt(-2.0F * std::log((static_cast<float>(bits >> 40) + 0.5F) * 0x1p-24F));
      const float angle = 2.0F * std::numbers::pi_v<float> * static_cast<float>(bits & 0xffffff) * 0x1p-24F;
      values[static_cast<std::size_t>(i)] = radius * std::cos(angle);
      values[static_cast<std::size_t>(i + 1)] = radius * std::sin(angle);
    }
    if (tensor.dtype == TESSERA_FLOAT32) {
      std::copy_n(values.data(), count, tensor.as<float>() + from);
    } else {
      (tensor.dtype == TESSERA_BFLOAT16 ? loops.to_bf16 : loops.to_f16)(values.data(),
                                                                        tensor.as<std::uint16_t>() + from, count);
    }
  });
}

// Fills memory with 0xff, which is NaN in each dtype, so that unwritten elements show. Also maps the pages.
void poison(const Tensor& tensor) { std::fill_n(tensor.memory.data(), tensor.memory.size_bytes(), std::byte{0xff}); }

template <typename Call>
double seconds_of(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Median of up to `repeat` rounds, fewer if they take long. clock(calls) returns the time of each of `calls` calls. The
// first call, which took `first`, only warms up, unless it took long enough to count.
template <typename Clock>
double median_seconds(int repeat, double first, int calls, const Clock& clock) {
  if (first >= kTimeBudgetSeconds) return first;
  std::vector<double> seconds;
  double spent = 0;
  for (int i = 0; i < repeat && (i == 0 || spent < kTimeBudgetSeconds); ++i) {
    seconds.push_back(clock(calls));
    spent += seconds.back() * calls;
  }
  std::nth_element(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2), seconds.end());
  return seconds[seconds.size() / 2];
}

class CellRun {
 public:
  explicit CellRun(const CellSettings& settings) : settings_(settings), shape_(settings.shape) {
    const peers::AttentionShape& s = shape_;
    Extents extents;
    extents[core::kB] = s.batch;
    extents[core::kSq] = s.seqlen_q;
    extents[core::kSk] = s.seqlen_k;
    extents[core::kHq] = s.heads_q;
    extents[core::kHkv] = s.heads_kv;
    extents[core::kD] = s.head_dim;
    extents[core::kDv] = s.head_dim_v;
    for (const core::TensorField& field : core::kTensorFields) {
      if (core::is_option(field) || !core::takes_part(field, backward())) continue;
      tensors_[field] = make_tensor(field.name, dtype_of(field, settings.dtype), extents.shape(field, field.dense));
    }
    peers::Team team(settings.host_threads);
    std::uint64_t stream = settings.seed * 4;
    for (const core::TensorField& field : core::kTensorFields) {
      const Tensor& tensor = tensors_[field];
      if (field.written == core::Written::kNever && tensor.present()) fill_normal(tensor, stream++, team);
    }
    tensors_.program = settings.program;
    if (settings.program) rows_.emplace(settings.program, shape_);
    placed_ = tensors_;
    if (settings.device.backend != TESSERA_BACKEND_CUDA) return;
    gpu_.emplace(settings.device.ordinal);
    for (const core::TensorField& field : core::kTensorFields) {
      Tensor& tensor = placed_[field];
      if (tensor.present()) tensor.memory = gpu_->copy_of(tensor.memory, tensor.source);
    }
    if (!settings.program) return;
    placed_.program = std::make_shared<ScoreProgram>(*settings.program);
    for (Tensor& tensor : placed_.program->tensors) tensor.memory = gpu_->copy_of(tensor.memory, tensor.source);
  }

  Cell measure(const std::function<void(const std::string&)>& report) {
    Cell cell{.settings = settings_, .kernel = {}, .tessera = {}, .others = {}};
    report("float64 reference on sampled rows");
    const AttentionTensors& t = tensors_;
    const peers::ExactSample exact(shape_, settings_.dtype, t["q"].memory.data(), t["k"].memory.data(),
                                   t["v"].memory.data(), backward() ? t["d_o"].memory.data() : nullptr,
                                   settings_.host_threads, rows());
    report("Tessera");
    cell.tessera = run_tessera(cell.kernel);
    add_errors(cell.tessera, exact, true);

    for (const Contestant* const contestant : settings_.against) {
      report(contestant->words);
      Other other{.contestant = contestant, .side = {}, .needs_bytes = 0, .refusal = {}};
      if (gpu_) {
        run_kernel(other);
      } else {
        other.needs_bytes =
            peers::StandardAttention::extra_bytes(shape_, settings_.dtype, settings_.direction, rows() != nullptr);
        if (other.needs_bytes <= settings_.standard_limit_bytes && peers::fits(other.needs_bytes)) {
          other.side = run_standard();
        }
      }
      if (other.side) add_errors(*other.side, exact, gpu_.has_value());
      cell.others.push_back(std::move(other));
    }
    return cell;
  }

 private:
  const peers::RowProgram* rows() const { return rows_ ? &*rows_ : nullptr; }

  bool backward() const { return settings_.direction == TESSERA_BACKWARD; }

  // The rows of this direction's results: o and lse, or d_q, d_k, d_v.
  template <typename Visit>
  void each_output(const Visit& visit) const {
    for (const core::TensorField& field : core::kTensorFields) {
      if (core::written(field, backward()) && tensors_[field].present()) visit(field);
    }
  }

  // Calls once, measuring memory, then for the clock.
  template <typename Prepare, typename Call>
  void measure_side(Side& side, const Prepare& prepare, const Call& call) const {
    each_output([&](const core::TensorField& field) { poison(tensors_[field]); });
    reset_peak_resident();
    const std::int64_t before = resident_bytes();
    prepare();
    const double first = seconds_of(call);
    side.resident_bytes = std::max<std::int64_t>(0, peak_resident_bytes() - before);
    side.seconds = median_seconds(settings_.repeat, first, 1, [&](int) { return seconds_of(call); });
    side.gflops = shape_.flops(settings_.direction) / side.seconds * 1e-9;
  }

  // The same on a GPU, by its clock, with several short calls (less than some milliseconds) at once. Copies the outputs
  // back.
  template <typename Call>
  void measure_on_gpu(Side& side, const Call& call) const {
    constexpr double kLeastSeconds = 5e-3;
    constexpr double kMostCalls = 100;
    each_output([&](const core::TensorField& field) { gpu_->fill(placed_[field].memory, 0xff); });
    gpu_->seconds(1, call);  // compiles, loads
    const double first = gpu_->seconds(1, call);
    const int calls = static_cast<int>(std::clamp(std::ceil(kLeastSeconds / first), 1.0, kMostCalls));
    side.seconds = median_seconds(settings_.repeat, first, calls, [&](int n) { return gpu_->seconds(n, call); });
    side.gflops = shape_.flops(settings_.direction) / side.seconds * 1e-9;
    each_output([&](const core::TensorField& field) { gpu_->download(tensors_[field].memory, placed_[field].memory); });
  }

  Memory workspace_for(const tessera_plan& plan) const {
    const auto bytes = static_cast<std::int64_t>(tessera_workspace_bytes(&plan));
    return gpu_ ? gpu_->allocate(bytes, "workspace") : Memory(bytes, "workspace");
  }

  tessera_problem problem_of(tessera_direction direction) const {
    tessera_problem problem;
    tessera_problem_init(&problem);
    problem.direction = direction;
    problem.causal = shape_.causal ? 1 : 0;
    placed_.describe(problem);
    return problem;
  }

  tessera_plan plan_of(tessera_direction direction) const {
    const tessera_problem problem = problem_of(direction);
    tessera_device device = settings_.device;
    if (direction != settings_.direction) device.family[0] = '\0';  // the request was for the other pass
    tessera_plan plan{};
    check_status(tessera_make_plan(&problem, &device, &plan));
    return plan;
  }

  void execute(const tessera_plan& plan, const Memory& workspace) const {
    const tessera_buffers buffers = placed_.buffers();
    const auto run = plan.problem.direction == TESSERA_BACKWARD ? tessera_backward : tessera_forward;
    check_status(run(&plan, &buffers, workspace.data(), static_cast<std::size_t>(workspace.size_bytes()), nullptr));
  }

  Side run_tessera(std::string& kernel) const {
    Side side;
    if (backward()) {
      const tessera_plan forward = plan_of(TESSERA_FORWARD);
      execute(forward, workspace_for(forward));
    }
    const tessera_plan plan = plan_of(settings_.direction);
    kernel = plan.family;
    Memory workspace;
    const auto prepare = [&] { workspace = workspace_for(plan); };
    const auto call = [&] { execute(plan, workspace); };
    if (gpu_) {
      prepare();
      measure_on_gpu(side, call);
    } else {
      measure_side(side, prepare, call);
    }
    side.extra_bytes = workspace.size_bytes() + tensors_["lse"].memory.size_bytes();
    return side;
  }

  // A contestant's kernel of the direction. Its backward pass uses Tessera's o and LSE.
  void run_kernel(Other& other) const {
    const std::string name = (backward() ? "bwd_" : "fwd_") + std::string(other.contestant->name);
    const tessera_problem problem = problem_of(settings_.direction);
    tessera_device device = settings_.device;
    device.family[name.copy(device.family, sizeof device.family - 1)] = '\0';
    tessera_plan plan{};
    const tessera_status status = tessera_make_plan(&problem, &device, &plan);
    if (status.code == TESSERA_UNSUPPORTED) {
      other.refusal = reason_in(status.message, name);
      return;
    }
    check_status(status);
    const std::int64_t lse_bytes = tensors_["lse"].memory.size_bytes();
    other.needs_bytes = static_cast<std::int64_t>(tessera_workspace_bytes(&plan)) + lse_bytes;
    if (other.needs_bytes > settings_.standard_limit_bytes || !gpu_->fits(other.needs_bytes)) return;
    const Memory workspace = workspace_for(plan);
    measure_on_gpu(other.side.emplace(), [&] { execute(plan, workspace); });
    other.side->extra_bytes = other.needs_bytes;
  }

  // "...; NAME: reason; ..." -> reason
  static std::string reason_in(const std::string& message, const std::string& name) {
    const std::size_t at = message.find(name + ": ");
    if (at == std::string::npos) return message;
    const std::size_t begin = at + name.size() + 2;
    return message.substr(begin, message.find("; ", begin) - begin);
  }

  Side run_standard() const {
    Side side;
    const AttentionTensors& t = tensors_;
    std::optional<peers::StandardAttention> standard;
    const auto prepare = [&] {
      standard.emplace(shape_, settings_.dtype, settings_.direction, settings_.device.threads, rows());
      if (backward())
        standard->forward(t["q"].memory.data(), t["k"].memory.data(), t["v"].memory.data(), t["o"].memory.data());
    };
    const auto call = [&] {
      if (backward()) {
        standard->backward(t["q"].memory.data(), t["k"].memory.data(), t["v"].memory.data(), t["d_o"].memory.data(),
                           t["d_q"].memory.data(), t["d_k"].memory.data(), t["d_v"].memory.data());
      } else {
        standard->forward(t["q"].memory.data(), t["k"].memory.data(), t["v"].memory.data(), t["o"].memory.data());
      }
    };
    measure_side(side, prepare, call);
    side.extra_bytes =
        peers::StandardAttention::extra_bytes(shape_, settings_.dtype, settings_.direction, rows() != nullptr);
    return side;
  }

  void add_errors(Side& side, const peers::ExactSample& exact, bool has_lse) const {
    const AttentionTensors& t = tensors_;
    if (!backward()) {
      side.errors.emplace_back("o", exact.o(t["o"].memory.data()));
      if (has_lse) side.errors.emplace_back("lse", exact.lse(t["lse"].as<float>()));
      side.error = side.errors.front().second;
      return;
    }
    side.errors.emplace_back("d_q", exact.d_q(t["d_q"].memory.data()));
    if (exact.has_key_gradients()) {
      side.errors.emplace_back("d_k", exact.d_k(t["d_k"].memory.data()));
      side.errors.emplace_back("d_v", exact.d_v(t["d_v"].memory.data()));
    }
    for (const auto& [name, error] : side.errors) side.error.merge(error);
  }

  CellSettings settings_;
  peers::AttentionShape shape_;
  AttentionTensors tensors_;         // this machine's memory
  AttentionTensors placed_;          // where Tessera reads and writes: the same, or a GPU's
  std::optional<ProgramRows> rows_;  // of the score program
  std::optional<Gpu> gpu_;
};

}  // namespace

std::span<const Contestant> contestants() { return kContestants; }

const Contestant* find_contestant(const std::string& name) {
  const auto* const found = std::find_if(std::begin(kContestants), std::end(kContestants),
                                         [&](const Contestant& c) { return c.name == name; });
  return found == std::end(kContestants) ? nullptr : found;
}

Cell measure_cell(const CellSettings& settings, const std::function<void(const std::string&)>& report) {
  report("random inputs");
  return CellRun(settings).measure(report);
}

}  // namespace tessera::cli
