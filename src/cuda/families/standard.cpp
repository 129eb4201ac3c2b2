// Standard attention, kernels/tessera/comparison/standard: the score matrices are stored in the workspace, and each
// product and each pass over their rows is a kernel. This file has the problems it supports and its launches.
//
//   forward    S = scale Q K^T │ P = softmax S, in place │ O = P V
//   backward   P = exp(scale Q K^T - LSE) │ dV = P^T dO │ dP = dO V^T │ dS = P o (dP - rowsum(P o dP)), in place
//              dQ = scale dS K │ dK = scale dS^T Q
#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

#include "core/geometry.hpp"
#include "core/status.hpp"
#include "cuda/estimate.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"
#include "cuda/registry.hpp"
#include "tessera/config.hpp"

namespace tessera::cuda {
namespace {

constexpr int kMostHeadDim = 128;
constexpr int kMostRowThreads = 1024, kFewVectors = 4, kManyVectors = 8;

// The decisions for a problem.
struct StandardPlan {
  StandardRowsConfig rows;
  int stages;
  int64_t pitch;         // row pitch of a score matrix, in elements
  int64_t matrix_bytes;  // of one score matrix
  Grid rows_grid;
};

constexpr uint64_t kTensors = ~(kServingTensors | kPlaceTensors | (kScoreTensors & ~tensors({"mask"})) |
                                tensors({"cu_seqlens_q", "cu_seqlens_k", "seqused_k", "alibi_slopes", "sink", "d_lse",
                                         "d_bias", "d_sink", "lse_low", "dropout_state"}));
constexpr Supports supports(tessera_direction direction) {
  return {direction, 80, kAnyNewer, kHalfPrecision, kMostHeadDim, kTensors};
}
constexpr Supports kFwdSupports = supports(TESSERA_FORWARD), kBwdSupports = supports(TESSERA_BACKWARD);

bool backward(const tessera_plan& plan) { return plan.problem.direction == TESSERA_BACKWARD; }

// Keys of a row that fit its threads' registers; the gradient holds two rows.
int64_t most_keys(bool gradient) {
  return int64_t{kMostRowThreads} * (gradient ? kFewVectors : kManyVectors) * kStandardVector;
}

std::string refuse_shape(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  if (core::packed_q(p) || core::packed_k(p)) return "packed sequences: not supported";
  if (core::is_part(p)) return "a global place: not supported";
  if (p.softcap > 0) return "softcap: not supported";
  if (plan.heads_kv != plan.heads_q) {
    return "k: " + std::to_string(plan.heads_kv) + " heads, must be those of q, " + std::to_string(plan.heads_q);
  }
  constexpr int64_t kMostHeads = 65535;  // limit of a grid's third dimension
  if (plan.batch * plan.heads_q > kMostHeads) return "more than 65535 heads";
  if (plan.max_seqlen_k > most_keys(backward(plan))) {
    return "k: " + std::to_string(plan.max_seqlen_k) + " keys, at most " + std::to_string(most_keys(backward(plan)));
  }
  return "";
}

std::string refuse_forward(const tessera_plan& plan) {
  std::string reason = refusal(kFwdSupports, plan);
  return reason.empty() ? refuse_shape(plan) : reason;
}
std::string refuse_backward(const tessera_plan& plan) {
  std::string reason = refusal(kBwdSupports, plan);
  return reason.empty() ? refuse_shape(plan) : reason;
}

StandardProductConfig product_config(const tessera_plan& plan, int stages) {
  StandardProductConfig config{};
  config.dtype = static_cast<Dtype>(plan.problem.q.dtype);
  config.stages = stages;
  return config;
}

// The most stages: three, or as many as fit.
int stages_of(const tessera_plan& plan) {
  constexpr int kMostStages = 3;
  StandardProductConfig largest = product_config(plan, kMostStages);
  largest.block_n = 128, largest.transpose_b = true;
  return standard_product_bytes(largest) <= plan.device.smem_bytes ? kMostStages : kMostStages - 1;
}

// An H100, GPT-2 medium's attention (docs/reference/papers.md).
constexpr Rate kFwdRates[] = {{64, 94}}, kBwdRates[] = {{64, 116}};
double estimate_us(const tessera_plan& plan) { return us_at_rate(plan, backward(plan) ? kBwdRates : kFwdRates); }

void configure(tessera_plan& plan) {
  constexpr int64_t kPitch = 64;  // elements, so that rows are whole cache lines
  StandardPlan own{};
  StandardRowsConfig& rows = own.rows;
  rows.dtype = static_cast<Dtype>(plan.problem.q.dtype);
  rows.gradient = backward(plan);
  rows.mask = core::present(plan.problem.mask) && !rows.gradient;  // P is 0 there
  rows.dropout = plan.problem.dropout_p > 0;
  const auto vectors = static_cast<uint64_t>(divide_up(std::max<int64_t>(plan.max_seqlen_k, 1), kStandardVector));
  const uint64_t threads = std::bit_ceil((vectors + kFewVectors - 1) / kFewVectors);
  rows.threads = static_cast<int>(std::clamp<uint64_t>(threads, 32, kMostRowThreads));
  rows.vectors = vectors <= uint64_t{kMostRowThreads} * kFewVectors ? kFewVectors : kManyVectors;
  own.stages = stages_of(plan);
  own.pitch = padded_to(plan.max_seqlen_k, kPitch);
  const int64_t total = rows_total(plan) * plan.heads_q;
  own.matrix_bytes = total * own.pitch * 2;
  own.rows_grid.x = static_cast<uint32_t>(divide_up(total, standard_rows_threads(rows) / rows.threads));
  tessera_plan_step& step = core::add_step(plan, backward(plan) ? kBwdStandard : kFwdStandard);
  step.block_m = kStandardBlockM, step.block_n = 128;
  step.num_warps = kStandardWarps, step.num_stages = own.stages;
  StandardProductConfig scores = product_config(plan, own.stages);
  scores.block_n = 128, scores.transpose_b = true;
  step.smem_bytes = smem_bytes(scores);
  step.num_items =
      plan.batch * plan.heads_q * divide_up(plan.max_seqlen_q, kStandardBlockM) * divide_up(plan.max_seqlen_k, 128);
  step.workspace_bytes = (backward(plan) ? 2 : 1) * own.matrix_bytes;
  core::keep_config(step, own);
}

// The common parts of a call's products and passes.
class Lowering {
 public:
  Lowering(const tessera_plan& plan, const tessera_plan_step& step, const tessera_buffers& buffers, void* workspace,
           LaunchList& launches)
      : plan_(plan), own_(core::config_of<StandardPlan>(step)), launches_(launches) {
    fill_problem_params(product_, plan, buffers);
    rows_ = {};
    static_cast<ProblemParams&>(rows_) = product_;
    p_ = matrix(workspace, 0), d_ = matrix(workspace, 1);
    rows_.p_matrix = p_.data, rows_.d_matrix = d_.data, rows_.pitch = own_.pitch;
    rows_.lse = product_.lse = stat_tensor(plan.problem.lse, buffers.lse);
    dropout_scale_ = plan.problem.dropout_p > 0 ? product_.dropout_scale : 1.0f;
  }

  struct Operand {
    RowTensor tensor;
    bool aligned;
    int64_t head_dim;  // 0: a score matrix
  };
  static Operand operand(const tessera_layout& layout, const void* data) {
    return {row_tensor(layout, data), rows_aligned(layout, data), layout.shape[layout.rank - 1]};
  }
  Operand p() const { return {p_, true, 0}; }
  Operand d() const { return {d_, true, 0}; }
  float dropout_scale() const { return dropout_scale_; }

  // c [queries][keys] = factor a b^T, with a and b [rows][head size]. For P, the exponentials of this.
  void scores(const Operand& a, const Operand& b, const Operand& c, float factor, bool probabilities) {
    StandardProductConfig config = config_for(plan_.max_seqlen_k, a, b);
    config.transpose_b = true, config.probabilities = probabilities;
    config.mask = probabilities && core::present(plan_.problem.mask);
    config.dropout = probabilities && plan_.problem.dropout_p > 0;
    launch(config, a, b, c, plan_.max_seqlen_q, plan_.max_seqlen_k, a.head_dim, factor);
  }
  // c [queries][head size] = factor a b, with a score matrix a and b [keys][head size].
  void over_keys(const Operand& a, const Operand& b, const Operand& c, float factor) {
    launch(config_for(b.head_dim, a, b), a, b, c, plan_.max_seqlen_q, b.head_dim, plan_.max_seqlen_k, factor);
  }
  // c [keys][head size] = factor a^T b, with a score matrix a and b [queries][head size]. kept: dropped entries of a
  // count as 0.
  void over_queries(const Operand& a, const Operand& b, const Operand& c, float factor, bool kept) {
    StandardProductConfig config = config_for(b.head_dim, a, b);
    config.transpose_a = true, config.dropout = kept && plan_.problem.dropout_p > 0;
    launch(config, a, b, c, plan_.max_seqlen_k, b.head_dim, plan_.max_seqlen_q, factor);
  }
  void over_rows() { launch_standard_rows(own_.rows, rows_, own_.rows_grid, launches_); }

 private:
  RowTensor matrix(void* workspace, int index) const {
    const int64_t head = plan_.max_seqlen_q * own_.pitch;
    char* const bytes = static_cast<char*>(workspace);
    return {bytes ? bytes + index * own_.matrix_bytes : nullptr, plan_.heads_q * head, own_.pitch, head};
  }

  StandardProductConfig config_for(int64_t columns, const Operand& a, const Operand& b) const {
    constexpr int kNarrow = 64, kWide = 128;
    StandardProductConfig config = product_config(plan_, own_.stages);
    config.block_n = columns <= kNarrow ? kNarrow : kWide;
    config.aligned = a.aligned && b.aligned;
    return config;
  }

  void launch(const StandardProductConfig& config, const Operand& a, const Operand& b, const Operand& c, int64_t rows,
              int64_t columns, int64_t inner, float factor) {
    StandardProductParams params = product_;
    params.a = a.tensor, params.b = b.tensor, params.c = c.tensor;
    params.rows = static_cast<int>(rows), params.columns = static_cast<int>(columns);
    params.inner = static_cast<int>(inner);
    params.factor = factor, params.c_aligned = c.aligned;
    const Grid grid{static_cast<uint32_t>(divide_up(columns, config.block_n)),
                    static_cast<uint32_t>(divide_up(rows, kStandardBlockM)),
                    static_cast<uint32_t>(plan_.batch * plan_.heads_q)};
    launch_standard_product(config, params, grid, launches_);
  }

  const tessera_plan& plan_;
  const StandardPlan own_;
  LaunchList& launches_;
  StandardProductParams product_{};
  StandardRowsParams rows_{};
  RowTensor p_, d_;
  float dropout_scale_;
};

tessera_status list_forward(const tessera_plan& plan, const tessera_plan_step& step, const tessera_buffers& buffers,
                            void* workspace, LaunchList& launches) {
  const tessera_problem& problem = plan.problem;
  Lowering to(plan, step, buffers, workspace, launches);
  const auto q = to.operand(problem.q, buffers.q), k = to.operand(problem.k, buffers.k);
  const auto v = to.operand(problem.v, buffers.v), o = to.operand(problem.o, buffers.o);
  to.scores(q, k, to.p(), static_cast<float>(problem.scale), false);
  to.over_rows();
  to.over_keys(to.p(), v, o, to.dropout_scale());
  return ok();
}

tessera_status list_backward(const tessera_plan& plan, const tessera_plan_step& step, const tessera_buffers& buffers,
                             void* workspace, LaunchList& launches) {
  const tessera_problem& problem = plan.problem;
  Lowering to(plan, step, buffers, workspace, launches);
  const auto q = to.operand(problem.q, buffers.q), k = to.operand(problem.k, buffers.k);
  const auto v = to.operand(problem.v, buffers.v), d_o = to.operand(problem.d_o, buffers.d_o);
  const auto scale = static_cast<float>(problem.scale);
  to.scores(q, k, to.p(), scale, true);
  to.over_queries(to.p(), d_o, to.operand(problem.d_v, buffers.d_v), to.dropout_scale(), true);
  to.scores(d_o, v, to.d(), 1.0f, false);
  to.over_rows();
  to.over_keys(to.d(), k, to.operand(problem.d_q, buffers.d_q), scale);
  to.over_queries(to.d(), q, to.operand(problem.d_k, buffers.d_k), scale, false);
  return ok();
}

}  // namespace

constinit const Family kFwdStandard{
    {"fwd_standard", TESSERA_KERNEL_FWD_STANDARD, refuse_forward, configure, estimate_us, true},
    kFwdSupports,
    list_forward,
    {}};
constinit const Family kBwdStandard{
    {"bwd_standard", TESSERA_KERNEL_BWD_STANDARD, refuse_backward, configure, estimate_us, true},
    kBwdSupports,
    list_backward,
    {}};

}  // namespace tessera::cuda
