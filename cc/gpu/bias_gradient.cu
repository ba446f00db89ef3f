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

cudaError_t ConvertBiasGradient(const float* from, void* to, DType dtype, int64_t size,
                                cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(CeilDiv(size, 256), 1 << 14));
  if (dtype == DType::kBF16) {
    ConvertBias<<<blocks, 256, 0, stream>>>(from, static_cast<__nv_bfloat16*>(to), size);
  } else {
    ConvertBias<<<blocks, 256, 0, stream>>>(from, static_cast<__half*>(to), size);
  }
  return cudaGetLastError();
}

}  // namespace jax_fmha::gpu
