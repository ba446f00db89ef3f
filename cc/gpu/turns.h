// Turns in the addition of dq, for an order that is the same in every run, worked out on the
// device.
//
// Many tiles of keys add to one tile of queries. They take turns in their order, and each waits for
// the one before. A tile takes a turn at every query tile between the first that it or a later tile
// needs and the last that it or an earlier one needs; so those of one query tile follow each other,
// and a tile's turn is its distance from the first. Where ranges only move forward, as with sorted
// segments, nobody takes one in vain.
#pragma once

#include <cuda_runtime.h>

#include "cc/gpu/problem_params.cuh"

namespace jax_fmha::gpu {

struct TurnPlan {
  // [batch, key tile]: first and one past the last query tile at which it takes a turn
  int2* takers = nullptr;
  int* first_takers = nullptr;  // [batch, query tile]: first key tile that takes a turn
};

// Fills the plan, whose arrays the caller provides, for tiles of block_q queries by block_kv keys
// on `stream`. `kv_plan` is the segment plan of the problem with queries and keys swapped.
cudaError_t RunTurnPlan(const ScoreParams& s, const SegmentPlan& kv_plan, int block_q, int block_kv,
                        const TurnPlan& plan, cudaStream_t stream);

}  // namespace jax_fmha::gpu
