// Which problems the Hopper forward takes, what it needs, and which instance runs them.
#include <string>

#include "cc/gpu/empty_forward.h"
#include "cc/gpu/plan.h"
#include "cc/sm90/forward/config.h"
#include "cc/sm90/forward/launch.h"
#include "cc/sm90/kernels.h"
#include "cc/sm90/refusal.h"

namespace jax_fmha {
namespace sm90 {
namespace {

ForwardMode ModeOf(const Problem& p, const ForwardTile& tile) {
  if (p.has_positions || p.has_mask || p.has_tile_mask || p.has_bias) return ForwardMode::kGeneral;
  if (p.uses_positions() || p.has_segment_ids || tile.head_dim != 128 || tile.head_dim_v != 128)
    return ForwardMode::kInterval;
  return ForwardMode::kDense;
}

std::string Refusal(const Problem& problem, const Device& device) {
  return SharedRefusal(problem, device);
}

int64_t Workspace(const Problem& problem, const Device&) {
  const ForwardTile tile = TileOf(static_cast<int>(problem.head_dim),
                                  static_cast<int>(problem.head_dim_v), ForwardMode::kGeneral);
  return gpu::ForwardWorkspaceBytes(problem, tile.block_q, tile.block_kv);
}

Status Run(const Problem& problem, const Operands& operands, const Launch& launch) {
  if (problem.batch * problem.num_q_heads * problem.seqlen_q == 0) return {};
  if (problem.seqlen_kv == 0) return gpu::LaunchEmptyForward(problem, operands, launch);
  const ForwardTile tile = TileOf(static_cast<int>(problem.head_dim),
                                  static_cast<int>(problem.head_dim_v), ForwardMode::kInterval);
  const ForwardMode mode = ModeOf(problem, tile);
#define FORWARD_INSTANCE(dtype_, mode_, head_dim_, head_dim_v_)                      \
  if (problem.dtype == DType::dtype_ && mode == ForwardMode::mode_ &&                \
      tile.head_dim == head_dim_ && tile.head_dim_v == head_dim_v_) {                \
    return LaunchForward<DType::dtype_, ForwardMode::mode_, head_dim_, head_dim_v_>( \
        problem, operands, launch);                                                  \
  }
#include "cc/sm90/forward/instances.def"
#undef FORWARD_INSTANCE
  return Status::Internal("attention: sm90 forward has no instance for this problem");
}

}  // namespace
}  // namespace sm90

const Kernel kSm90Forward = {"sm90_forward", "sm90",          Pass::kForward,
                             sm90::Refusal,  sm90::Workspace, sm90::Run};

}  // namespace jax_fmha
