// Segment ids as intervals of keys per query row, worked out on the device.
#pragma once

#include <cuda_runtime.h>

#include "cc/gpu/problem_params.cuh"

namespace jax_fmha::gpu {

// Carves the plan from `memory` (SegmentPlanBytes) and fills it on `stream`. T and S are positive.
cudaError_t RunSegmentPlan(const ScoreParams& s, char* memory, cudaStream_t stream,
                           SegmentPlan* plan);

}  // namespace jax_fmha::gpu
