#include "cc/gpu/empty_backward.h"

#include "cc/gpu/check.h"
#include "cc/gpu/delta.cuh"

namespace jax_fmha::gpu {

Status LaunchEmptyBackward(const Problem& problem, const Operands& operands, const Launch& launch) {
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  const int64_t size = SizeOf(problem.dtype);
  const int64_t q_rows = problem.batch * problem.seqlen_q * problem.num_q_heads,
                kv_rows = problem.batch * problem.seqlen_kv * problem.num_kv_heads;
  const struct {
    void* data;
    int64_t bytes;
  } results[] = {{operands.dq.data, q_rows * problem.head_dim * size},
                 {operands.dk.data, kv_rows * problem.head_dim * size},
                 {operands.dv.data, kv_rows * problem.head_dim_v * size},
                 {operands.dbias.data, BiasGradientSize(problem) * SizeOf(problem.bias_dtype)}};
  for (const auto& [data, bytes] : results) {
    if (bytes == 0) continue;
    if (Status s = ToStatus(cudaMemsetAsync(data, 0, bytes, stream), "memset"); !s.ok()) return s;
  }
  if (operands.dsinks.data == nullptr || operands.dsinks.entries * problem.num_q_heads == 0)
    return {};
  const int64_t padded_q = RoundUp(problem.seqlen_q, 128),
                pairs = problem.batch * problem.num_q_heads;
  auto* delta = static_cast<float*>(launch.workspace);
  const DeltaParams params = {MakeScoreParams(problem, operands, 1.f),
                              operands.saved_out,
                              operands.dout,
                              operands.saved_lse,
                              operands.dlse,
                              delta,
                              delta + pairs * padded_q,
                              static_cast<int>(padded_q),
                              reinterpret_cast<int*>(delta + 2 * pairs * padded_q)};
  const auto blocks = static_cast<unsigned>(pairs * (padded_q / kDeltaRows));
  if (blocks > 0 && problem.dtype == DType::kBF16) {
    Delta<__nv_bfloat16, 32><<<blocks, 256, 0, stream>>>(params);
  } else if (blocks > 0) {
    Delta<__half, 32><<<blocks, 256, 0, stream>>>(params);
  }
  const SinkParams sinks = {
      params.score,    operands.saved_lse,    delta,
      params.padded_q, operands.dsinks.batch, static_cast<float*>(operands.dsinks.data)};
  SinkGradient<<<static_cast<unsigned>(operands.dsinks.entries * problem.num_q_heads), 256, 0,
                 stream>>>(sinks);
  return ToStatus(cudaGetLastError(), "empty backward");
}

}  // namespace jax_fmha::gpu
