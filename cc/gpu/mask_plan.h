// What bool masks and tile masks say of whole tiles of the main kernel, worked out on the device.
#pragma once

#include <cuda_runtime.h>

#include "cc/gpu/problem_params.cuh"

namespace jax_fmha::gpu {

// How the main kernel walks over tiles: over keys for a tile of queries, or the other way round.
enum class WalkOver { kKeys, kQueries };

// Fills `memory` (MaskPlanBytes) for tiles of block_q rows and block_kv keys on `stream`. The score
// parameters carry a mask or a tile mask; T and S are positive.
cudaError_t RunMaskPlan(const ScoreParams& s, int block_q, int block_kv, WalkOver walk,
                        char* memory, cudaStream_t stream, MaskPlan* plan);

}  // namespace jax_fmha::gpu
