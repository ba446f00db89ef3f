// The gradient of a 16-bit bias, from its sums in float32.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cc/core/types.h"

namespace jax_fmha::gpu {

cudaError_t ConvertBiasGradient(const float* from, void* to, DType dtype, int64_t size,
                                cudaStream_t stream);

}  // namespace jax_fmha::gpu
