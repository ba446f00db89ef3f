#include "cc/gpu/bias_gradient.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

namespace jax_fmha::gpu {
namespace {

template <typename T>
__global__ void __launch_bounds__(256) ConvertBias(const float* from, T* to, int64_t size) {
  const int64_t step = int64_t{gridDim.x} * 256;
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < size; i += step) {
    to[i] = static_cast<T>(from[i]);
  }
}

}  // namespace

cudaError_t BeginBiasGradient(const Problem& problem, const Result& dbias, char* memory,
                              cudaStream_t stream, float** sums) {
  const int64_t size = BiasGradientSize(problem);
  *sums = nullptr;
  if (size == 0) return cudaSuccess;
  if (BiasSumBytes(problem) != 0) {
    *sums = reinterpret_cast<float*>(memory);
    return cudaSuccess;
  }
  *sums = static_cast<float*>(dbias.data);
  return cudaMemsetAsync(*sums, 0, size * sizeof(float), stream);
}

cudaError_t EndBiasGradient(const Problem& problem, const Result& dbias, const float* sums,
                            cudaStream_t stream) {
  if (BiasSumBytes(problem) == 0) return cudaSuccess;
  const int64_t size = BiasGradientSize(problem);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(CeilDiv(size, 256), 1 << 14));
  if (problem.bias_dtype == DType::kBF16) {
    ConvertBias<<<blocks, 256, 0, stream>>>(sums, static_cast<__nv_bfloat16*>(dbias.data), size);
  } else {
    ConvertBias<<<blocks, 256, 0, stream>>>(sums, static_cast<__half*>(dbias.data), size);
  }
  return cudaGetLastError();
}

}  // namespace jax_fmha::gpu
