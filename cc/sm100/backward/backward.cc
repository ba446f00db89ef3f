// Which problems the Blackwell backward takes, what it needs, and which instance runs them.
#include <string>

#include "cc/gpu/empty_backward.h"
#include "cc/sm100/backward/config.h"
#include "cc/sm100/backward/launch.h"
#include "cc/sm100/kernels.h"
#include "cc/sm100/refusal.h"

namespace jax_fmha {
namespace sm100 {
namespace {

// Segments may let ranges of queries go back and forth, for which turns must be planned.
ForwardMode ModeOf(const Problem& p) {
  return p.has_positions || p.has_mask || p.has_tile_mask || p.has_bias ||
                 (p.deterministic && p.has_segment_ids)
             ? ForwardMode::kGeneral
             : ForwardMode::kInterval;
}

std::string Refusal(const Problem& p, const Device& device) {
  std::string reason = SharedRefusal(p, device, kBackwardMaxHeadDim, kBackwardMaxHeadDimV);
  return reason.empty() ? gpu::BackwardRefusal(p) : reason;
}

int64_t Workspace(const Problem& problem, const Device&) { return WorkspaceOf(problem).bytes; }

Status Run(const Problem& problem, const Operands& operands, const Launch& launch) {
  if (problem.batch * problem.num_q_heads * problem.seqlen_q == 0 || problem.seqlen_kv == 0) {
    return gpu::LaunchEmptyBackward(problem, operands, launch);
  }
  const BackwardTile tile =
      BackwardTileOf(static_cast<int>(problem.head_dim), static_cast<int>(problem.head_dim_v));
  const ForwardMode mode = ModeOf(problem);
#define BACKWARD_INSTANCE(dtype_, mode_, head_dim_, head_dim_v_)                      \
  if (problem.dtype == DType::dtype_ && mode == ForwardMode::mode_ &&                 \
      tile.head_dim == head_dim_ && tile.head_dim_v == head_dim_v_) {                 \
    return LaunchBackward<DType::dtype_, ForwardMode::mode_, head_dim_, head_dim_v_>( \
        problem, operands, launch);                                                   \
  }
#include "cc/sm100/backward/instances.def"
#undef BACKWARD_INSTANCE
  return Status::Internal("attention: sm100 backward has no instance for this problem");
}

}  // namespace
}  // namespace sm100

const Kernel kSm100Backward = {"sm100_backward", "sm100",          Pass::kBackward,
                               sm100::Refusal,   sm100::Workspace, sm100::Run};

}  // namespace jax_fmha
