// Tiles of the backward kernel by head dims. Plain C++: `backward.cc` chooses with it, `kernel.cuh`
// is built from it.
#pragma once

#include "cc/sm100/forward/config.h"

namespace jax_fmha::sm100 {

// Head dims up to (head_dim, head_dim_v) are zero-filled to it. Every tile is kRows keys by kRows
// queries.
struct BackwardTile {
  int head_dim, head_dim_v;
  int q_stages, dout_stages;
};

// Keys, values, the stages of queries and output gradients, the gradients of one tile's scores, and
// 3 KiB of row statistics and barriers share 227 KiB.
constexpr BackwardTile BackwardTileOf(int head_dim, int head_dim_v) {
  if (head_dim <= 64 && head_dim_v <= 64) return {64, 64, 3, 3};
  if (head_dim <= 128 && head_dim_v <= 128) return {128, 128, 2, 2};
  return {192, 128, 1, 2};
}

inline constexpr int kBackwardMaxHeadDim = 192, kBackwardMaxHeadDimV = 128;

}  // namespace jax_fmha::sm100
