// Which problems the Hopper backward takes, what it needs, and which instance runs them.
#include <string>

#include "cc/gpu/empty_backward.h"
#include "cc/sm90/backward/config.h"
#include "cc/sm90/backward/launch.h"
#include "cc/sm90/kernels.h"
#include "cc/sm90/refusal.h"

namespace jax_fmha {
namespace sm90 {
namespace {

std::string Refusal(const Problem& p, const Device& device) {
  if (std::string reason = SharedRefusal(p, device); !reason.empty()) return reason;
  return gpu::BackwardRefusal(p);
}

int64_t Workspace(const Problem& problem, const Device&) { return WorkspaceOf(problem).bytes; }

Status Run(const Problem& problem, const Operands& operands, const Launch& launch) {
  if (problem.batch * problem.num_q_heads * problem.seqlen_q == 0 || problem.seqlen_kv == 0) {
    return gpu::LaunchEmptyBackward(problem, operands, launch);
  }
  const BackwardTile tile =
      BackwardTileOf(static_cast<int>(problem.head_dim), static_cast<int>(problem.head_dim_v));
  const ForwardMode mode =
      problem.has_positions || problem.has_mask || problem.has_tile_mask || problem.has_bias
          ? ForwardMode::kGeneral
          : ForwardMode::kInterval;
#define BACKWARD_INSTANCE(dtype_, mode_, head_dim_, head_dim_v_)                      \
  if (problem.dtype == DType::dtype_ && mode == ForwardMode::mode_ &&                 \
      tile.head_dim == head_dim_ && tile.head_dim_v == head_dim_v_) {                 \
    return LaunchBackward<DType::dtype_, ForwardMode::mode_, head_dim_, head_dim_v_>( \
        problem, operands, launch);                                                   \
  }
#include "cc/sm90/backward/instances.def"
#undef BACKWARD_INSTANCE
  return Status::Internal("attention: sm90 backward has no instance for this problem");
}

}  // namespace
}  // namespace sm90

const Kernel kSm90Backward = {"sm90_backward", "sm90",          Pass::kBackward,
                              sm90::Refusal,   sm90::Workspace, sm90::Run};

}  // namespace jax_fmha
