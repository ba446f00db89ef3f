// Which problems the Blackwell forward takes, what it needs, and which instance runs them.
#include <string>

#include "cc/gpu/empty_forward.h"
#include "cc/gpu/plan.h"
#include "cc/sm100/forward/config.h"
#include "cc/sm100/forward/launch.h"
#include "cc/sm100/kernels.h"
#include "cc/sm100/refusal.h"

namespace jax_fmha {
namespace sm100 {
namespace {

ForwardMode ModeOf(const Problem& p) {
  if (p.has_positions || p.has_mask || p.has_tile_mask || p.has_bias) return ForwardMode::kGeneral;
  if (p.uses_positions() || p.has_segment_ids) return ForwardMode::kInterval;
  return ForwardMode::kDense;
}

std::string Refusal(const Problem& problem, const Device& device) {
  return SharedRefusal(problem, device, kMaxHeadDim, kMaxHeadDimV);
}

int64_t Workspace(const Problem& problem, const Device&) {
  const int head_dim_v = static_cast<int>(problem.head_dim_v);
  const ForwardTile tile = TileOf(static_cast<int>(problem.head_dim), head_dim_v);
  return gpu::ForwardWorkspaceBytes(problem, kGroups * kRows, kRows,
                                    NumValueParts(head_dim_v, tile));
}

Status Run(const Problem& problem, const Operands& operands, const Launch& launch) {
  if (problem.batch * problem.num_q_heads * problem.seqlen_q == 0) return {};
  if (problem.seqlen_kv == 0) return gpu::LaunchEmptyForward(problem, operands, launch);
  const ForwardTile tile =
      TileOf(static_cast<int>(problem.head_dim), static_cast<int>(problem.head_dim_v));
  const ForwardMode mode = ModeOf(problem);
#define FORWARD_INSTANCE(dtype_, mode_, head_dim_, head_dim_v_)                      \
  if (problem.dtype == DType::dtype_ && mode == ForwardMode::mode_ &&                \
      tile.head_dim == head_dim_ && tile.head_dim_v == head_dim_v_) {                \
    return LaunchForward<DType::dtype_, ForwardMode::mode_, head_dim_, head_dim_v_>( \
        problem, operands, launch);                                                  \
  }
#include "cc/sm100/forward/instances.def"
#undef FORWARD_INSTANCE
  return Status::Internal("attention: sm100 forward has no instance for this problem");
}

}  // namespace
}  // namespace sm100

const Kernel kSm100Forward = {"sm100_forward", "sm100",          Pass::kForward,
                              sm100::Refusal,  sm100::Workspace, sm100::Run};

}  // namespace jax_fmha
