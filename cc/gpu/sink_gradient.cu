#include "cc/gpu/delta.cuh"

namespace jax_fmha::gpu {

// One block per element of dsinks, adding in a fixed order.
__global__ void __launch_bounds__(256) SinkGradient(const __grid_constant__ SinkParams p) {
  __shared__ float partial[256];
  const ScoreParams& s = p.score;
  const int64_t entry = blockIdx.x / s.num_q_heads;
  const int head = blockIdx.x % s.num_q_heads;
  float sum = 0.f;
  for (int b = 0; b < s.batch; ++b) {
    if (EntryOf(p.to, b) != entry) continue;
    const float sink = ReadFloat(s.sinks, EntryOf(s.sinks.batch, b) * s.num_q_heads + head);
    const float* lse = static_cast<const float*>(p.lse.data) +
                       (EntryOf(p.lse.batch, b) * s.num_q_heads + head) * s.seqlen_q;
    const float* delta = p.delta + (static_cast<int64_t>(b) * s.num_q_heads + head) * p.padded_q;
    const int q_length = LimitsOf(s, b).q_length;  // rows beyond have no gradient
    for (int i = threadIdx.x; i < q_length; i += 256) {
      if (lse[i] != -kInf) sum -= expf(sink - lse[i]) * delta[RowSlot(i)];
    }
  }
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int step = 128; step > 0; step /= 2) {
    if (threadIdx.x < step) partial[threadIdx.x] += partial[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) p.dsinks[blockIdx.x] = partial[0];
}

}  // namespace jax_fmha::gpu
