// Tiles of the backward kernel by head dims. Plain C++: `backward.cc` chooses with it, `kernel.cuh`
// is built from it.
#pragma once

#include "cc/sm90/forward/config.h"

namespace jax_fmha::sm90 {

struct BackwardTile {
  int head_dim, head_dim_v;
  int block_q, block_kv, num_stages, box_cols;
};

constexpr BackwardTile BackwardTileOf(int head_dim, int head_dim_v) {
  if (head_dim <= 64 && head_dim_v <= 64) return {64, 64, 128, 128, 2, 64};
  if (head_dim <= 128 && head_dim_v <= 128) return {128, 128, 64, 128, 2, 64};
  if (head_dim <= 192 && head_dim_v <= 128) return {192, 128, 64, 128, 2, 32};
  if (head_dim <= 192 && head_dim_v <= 192) return {192, 192, 64, 64, 2, 32};
  return {256, 256, 64, 64, 2, 64};
}

// Whether scores and dP start from their rows' statistics, see cc/gpu/row_parts.cuh: wider heads
// leave no room for these.
constexpr bool StartsFromStatistics(int head_dim) { return head_dim <= 128; }

}  // namespace jax_fmha::sm90
