// Tiles of the forward kernel by head dims. Plain C++: `forward.cc` chooses with it, `kernel.cuh`
// is built from it.
#pragma once

namespace jax_fmha::sm90 {

enum class ForwardMode {
  kDense,     // every key up to kv_length
  kInterval,  // each row sees one interval of keys, by causality, window, lengths and segments
  kGeneral,   // also positions, mask and bias
};

// Head dims up to (head_dim, head_dim_v) are zero-filled to it. `block_q` rows are shared by
// block_q / 64 consumer warpgroups; `box_cols` columns make one swizzled box of shared memory.
struct ForwardTile {
  int head_dim, head_dim_v;
  int block_q, block_kv, num_stages, box_cols;
};

// Only head dims 128 have a kernel of their own for kDense; others run as kInterval.
constexpr ForwardTile TileOf(int head_dim, int head_dim_v, ForwardMode mode) {
  if (head_dim <= 64 && head_dim_v <= 64)
    return {64, 64, mode == ForwardMode::kGeneral ? 128 : 192, 128, 2, 64};
  if (head_dim <= 96 && head_dim_v <= 96) return {96, 96, 128, 128, 2, 32};
  if (head_dim <= 128 && head_dim_v <= 128) return {128, 128, 128, 128, 2, 64};
  if (head_dim <= 192 && head_dim_v <= 128) return {192, 128, 128, 128, 2, 64};
  if (head_dim <= 192 && head_dim_v <= 192) return {192, 192, 128, 96, 2, 64};
  return {256, 256, 128, 80, 2, 64};
}

}  // namespace jax_fmha::sm90
