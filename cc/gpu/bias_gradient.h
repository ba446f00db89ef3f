// The gradient of bias is summed in float32: in the result itself, or in workspace where that has
// 16 bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cc/core/operands.h"
#include "cc/gpu/plan.h"

namespace jax_fmha::gpu {

// Where to sum, zeroed; null if no gradient is wanted. `memory` has BiasSumBytes, zeroed.
cudaError_t BeginBiasGradient(const Problem& problem, const Result& dbias, char* memory,
                              cudaStream_t stream, float** sums);

// From the sums to the result.
cudaError_t EndBiasGradient(const Problem& problem, const Result& dbias, const float* sums,
                            cudaStream_t stream);

}  // namespace jax_fmha::gpu
