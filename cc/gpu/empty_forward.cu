#include "cc/gpu/empty_forward.h"

#include "cc/gpu/check.h"
#include "cc/gpu/problem_params.cuh"
#include "cc/gpu/softmax.cuh"

namespace jax_fmha::gpu {
namespace {

// Rows without any key (S == 0): out 0, lse -inf or the sink.
template <typename T>
__global__ void FillEmptyForward(const __grid_constant__ ScoreParams s, T* out, float* lse) {
  const int64_t rows = static_cast<int64_t>(s.batch) * s.num_q_heads * s.seqlen_q,
                columns = rows * s.head_dim_v;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < columns;
       i += step) {
    out[i] = static_cast<T>(0.f);
  }
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows;
       i += step) {
    const int64_t pair = i / s.seqlen_q;
    const int b = static_cast<int>(pair / s.num_q_heads),
              head = static_cast<int>(pair % s.num_q_heads);
    lse[i] = s.sinks.data == nullptr
                 ? -kInf
                 : ReadFloat(s.sinks, EntryOf(s.sinks.batch, b) * s.num_q_heads + head);
  }
}

}  // namespace

Status LaunchEmptyForward(const Problem& problem, const Operands& operands, const Launch& launch) {
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  const ScoreParams score = MakeScoreParams(problem, operands, 1.f);
  auto* lse = static_cast<float*>(operands.lse.data);
  if (problem.dtype == DType::kBF16) {
    FillEmptyForward<<<264, 512, 0, stream>>>(score, static_cast<__nv_bfloat16*>(operands.out.data),
                                              lse);
  } else {
    FillEmptyForward<<<264, 512, 0, stream>>>(score, static_cast<__half*>(operands.out.data), lse);
  }
  return ToStatus(cudaGetLastError(), "empty forward");
}

}  // namespace jax_fmha::gpu
