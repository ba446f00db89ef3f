#include "cc/gpu/check.h"
#include "cc/gpu/delta.cuh"
#include "cc/sm90/backward/launch.h"

namespace jax_fmha::sm90 {

Status LaunchBackwardEmpty(const Problem& problem, const Operands& operands, const Launch& launch) {
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  const int64_t size = SizeOf(problem.dtype);
  const int64_t q_rows = problem.batch * problem.seqlen_q * problem.num_q_heads,
                kv_rows = problem.batch * problem.seqlen_kv * problem.num_kv_heads;
  cudaMemsetAsync(operands.dq.data, 0, q_rows * problem.head_dim * size, stream);
  cudaMemsetAsync(operands.dk.data, 0, kv_rows * problem.head_dim * size, stream);
  cudaMemsetAsync(operands.dv.data, 0, kv_rows * problem.head_dim_v * size, stream);
  if (const int64_t elements = gpu::BiasGradientSize(problem); elements > 0) {
    cudaMemsetAsync(operands.dbias.data, 0, elements * SizeOf(problem.bias_dtype), stream);
  }
  if (operands.dsinks.data == nullptr || operands.dsinks.entries * problem.num_q_heads == 0) {
    return gpu::ToStatus(cudaGetLastError(), "empty backward");
  }
  const BackwardWorkspace workspace = WorkspaceOf(problem);
  char* memory = static_cast<char*>(launch.workspace);
  gpu::DeltaParams delta{};
  delta.score = gpu::MakeScoreParams(problem, operands, 1.f);
  delta.out = operands.saved_out;
  delta.dout = operands.dout;
  delta.lse = operands.saved_lse;
  delta.dlse = operands.dlse;
  delta.delta = reinterpret_cast<float*>(memory + workspace.delta);
  delta.lse2 = reinterpret_cast<float*>(memory + workspace.lse2);
  delta.padded_q = static_cast<int>(PaddedSeqlenQ(problem));
  delta.has_large = reinterpret_cast<int*>(memory + workspace.counters);  // not looked at
  const auto blocks = static_cast<unsigned>(problem.batch * problem.num_q_heads *
                                            (delta.padded_q / gpu::kDeltaRows));
  if (blocks > 0 && problem.dtype == DType::kBF16) {
    gpu::Delta<__nv_bfloat16, 32><<<blocks, 256, 0, stream>>>(delta);
  } else if (blocks > 0) {
    gpu::Delta<__half, 32><<<blocks, 256, 0, stream>>>(delta);
  }
  const gpu::SinkParams sinks = {delta.score,           operands.saved_lse,
                                 delta.delta,           delta.padded_q,
                                 operands.dsinks.batch, static_cast<float*>(operands.dsinks.data)};
  gpu::SinkGradient<<<static_cast<unsigned>(operands.dsinks.entries * problem.num_q_heads), 256, 0,
                      stream>>>(sinks);
  return gpu::ToStatus(cudaGetLastError(), "empty backward");
}

}  // namespace jax_fmha::sm90
