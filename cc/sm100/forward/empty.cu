#include "cc/gpu/check.h"
#include "cc/gpu/repair.cuh"
#include "cc/sm100/forward/launch.h"

namespace jax_fmha::sm100 {

Status LaunchForwardEmpty(const Problem& problem, const Operands& operands, const Launch& launch) {
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  const gpu::ScoreParams score = gpu::MakeScoreParams(problem, operands, 1.f);
  auto* lse = static_cast<float*>(operands.lse.data);
  if (problem.dtype == DType::kBF16) {
    gpu::FillEmptyForward<<<264, 512, 0, stream>>>(
        score, static_cast<__nv_bfloat16*>(operands.out.data), lse);
  } else {
    gpu::FillEmptyForward<<<264, 512, 0, stream>>>(score, static_cast<__half*>(operands.out.data),
                                                   lse);
  }
  return gpu::ToStatus(cudaGetLastError(), "empty forward");
}

}  // namespace jax_fmha::sm100
