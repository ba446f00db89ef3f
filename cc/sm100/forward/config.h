// Tiles of the forward kernel by head dims. Plain C++: `forward.cc` chooses with it, `kernel.cuh`
// is built from it.
#pragma once

namespace jax_fmha::sm100 {

enum class ForwardMode {
  kDense,     // every key up to kv_length
  kInterval,  // each row sees one interval of keys, by causality, window, lengths and segments
  kGeneral,   // also positions, masks and bias
};

// Head dims up to (head_dim, head_dim_v) are zero-filled to it. Every tile is two groups of
// kRows query rows by kRows keys: a row of scores is a lane of tensor memory. Wider values are
// worked on in parts of head_dim_v columns, each by a tile of its own that computes the scores
// anew.
struct ForwardTile {
  int head_dim, head_dim_v;
  int k_stages, v_stages;
};

inline constexpr int kRows = 128;
inline constexpr int kGroups = 2;
inline constexpr int kBoxCols = 64;  // columns of one swizzled box of shared memory

// Two groups of queries, the stages of keys and values, and 3 KiB of barriers and statistics share
// 227 KiB; their scores and outputs share the 512 columns of tensor memory.
constexpr ForwardTile TileOf(int head_dim, int head_dim_v) {
  if (head_dim <= 64 && head_dim_v <= 64) return {64, 64, 3, 3};
  if (head_dim <= 128 && head_dim_v <= 128) return {128, 128, 2, 2};
  if (head_dim <= 192 && head_dim_v <= 128) return {192, 128, 2, 1};
  return {256, 128, 1, 1};
}

constexpr int NumValueParts(int head_dim_v, const ForwardTile& tile) {
  return (head_dim_v + tile.head_dim_v - 1) / tile.head_dim_v;
}

inline constexpr int kMaxHeadDim = 256, kMaxHeadDimV = 256;

}  // namespace jax_fmha::sm100
