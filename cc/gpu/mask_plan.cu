#include "cc/gpu/mask_plan.h"

#include <algorithm>

#include "cc/gpu/tma.h"

namespace jax_fmha::gpu {
namespace {

struct ClassifyParams {
  ScoreParams score;
  WalkOver walk;
  int block_q, block_kv;
  int num_heads, num_lines, line_tiles, line_words;
  int64_t num_words;
  TileWord* words;
};

// Whether the mask keeps some pair of a tile, and whether it keeps all.
struct Verdict {
  bool any, all;
};

// The warp reads the rows of a dense mask. Rows or columns that the mask shares are read once.
__device__ Verdict OfDense(const ScoreParams& s, int64_t entry, int64_t head, int q_first,
                           int q_end, int kv_first, int kv_end) {
  const ScoreStrides& strides = s.mask_strides;
  const auto* mask = static_cast<const uint8_t*>(s.mask.data) + entry * strides.entry +
                     head * strides.head + kv_first * strides.col;
  const int lane = threadIdx.x % 32;
  if (strides.row == 0) q_end = q_first + 1;
  const int num_cols = strides.col == 0 ? 1 : kv_end - kv_first;
  Verdict x = {false, true};
  // Sixteen at a time where rows are aligned; a bool is one byte, 0 or 1.
  const bool is_wide = strides.col != 0 && num_cols % 16 == 0 && strides.row % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(mask) % 16 == 0;
  const int step = is_wide ? 16 : 1, per_row = num_cols / step;
  const int num_pieces = (q_end - q_first) * per_row;
#pragma unroll 4
  for (int i = lane; i < num_pieces; i += 32) {
    const uint8_t* at = mask + (q_first + i / per_row) * strides.row + i % per_row * step;
    if (is_wide) {
      const uint4 y = *reinterpret_cast<const uint4*>(at);
      x.any |= (y.x | y.y | y.z | y.w) != 0;
      x.all &= (y.x & y.y & y.z & y.w) == 0x01010101;
    } else {
      x.any |= *at != 0;
      x.all &= *at != 0;
    }
  }
  return x;
}

// The warp reads the caller's tiles that meet the tile.
__device__ Verdict OfTiles(const TileMaskParams& t, int64_t entry_and_head, int q_first, int q_end,
                           int kv_first, int kv_end) {
  const auto* codes =
      static_cast<const int32_t*>(t.tiles.data) + entry_and_head * t.grid_rows * t.grid_cols;
  const int row = q_first / t.tile_rows, num_rows = (q_end - 1) / t.tile_rows - row + 1;
  const int col = kv_first / t.tile_cols, num_cols = (kv_end - 1) / t.tile_cols - col + 1;
  Verdict x = {false, true};
  for (int i = threadIdx.x % 32; i < num_rows * num_cols; i += 32) {
    const int32_t code = codes[int64_t{row + i / num_cols} * t.grid_cols + col + i % num_cols];
    x.any |= code != 0;
    x.all &= code == 1;
  }
  return x;
}

// A block works out words, a warp of it one tile of each.
__global__ void __launch_bounds__(32 * kWordTiles)
    ClassifyTiles(const __grid_constant__ ClassifyParams p) {
  __shared__ TileWord result;
  const ScoreParams& s = p.score;
  const int warp = threadIdx.x / 32;
  for (int64_t at = blockIdx.x; at < p.num_words; at += gridDim.x) {
    if (threadIdx.x == 0) result = {0, 0};
    __syncthreads();
    const int n = static_cast<int>(at % p.line_words) * kWordTiles + warp;
    const int line = static_cast<int>(at / p.line_words % p.num_lines);
    const int64_t entry_and_head = at / p.line_words / p.num_lines;
    if (n < p.line_tiles) {
      const int q_first = (p.walk == WalkOver::kKeys ? line : n) * p.block_q,
                kv_first = (p.walk == WalkOver::kKeys ? n : line) * p.block_kv;
      const int q_end = min(q_first + p.block_q, s.seqlen_q),
                kv_end = min(kv_first + p.block_kv, s.seqlen_kv);
      const Verdict x =
          s.mask.data != nullptr
              ? OfDense(s, entry_and_head / p.num_heads, entry_and_head % p.num_heads, q_first,
                        q_end, kv_first, kv_end)
              : OfTiles(s.tile_mask, entry_and_head, q_first, q_end, kv_first, kv_end);
      const bool any = __any_sync(0xffffffff, x.any), all = __all_sync(0xffffffff, x.all);
      if (threadIdx.x % 32 == 0 && any) {
        atomicOr(&result.seen, 1u << warp);
        if (!all) atomicOr(&result.partial, 1u << warp);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) p.words[at] = result;
  }
}

}  // namespace

cudaError_t RunMaskPlan(const ScoreParams& s, int block_q, int block_kv, WalkOver walk,
                        char* memory, cudaStream_t stream, MaskPlan* plan) {
  const bool is_dense = s.mask.data != nullptr;
  const int q_tiles = static_cast<int>(CeilDiv(s.seqlen_q, block_q)),
            kv_tiles = static_cast<int>(CeilDiv(s.seqlen_kv, block_kv));
  ClassifyParams p{};
  p.score = s;
  p.walk = walk;
  p.block_q = block_q;
  p.block_kv = block_kv;
  p.num_heads = is_dense ? (s.mask_strides.head == 0 ? 1 : s.num_q_heads) : s.tile_mask.num_heads;
  p.num_lines = walk == WalkOver::kKeys ? q_tiles : kv_tiles;
  p.line_tiles = walk == WalkOver::kKeys ? kv_tiles : q_tiles;
  p.line_words = static_cast<int>(CeilDiv(p.line_tiles, kWordTiles));
  p.words = reinterpret_cast<TileWord*>(memory);
  plan->words = p.words;
  plan->map = is_dense ? s.mask.batch : s.tile_mask.tiles.batch;
  plan->num_heads = p.num_heads;
  plan->num_lines = p.num_lines;
  plan->line_words = p.line_words;
  p.num_words = EntriesOf(plan->map) * p.num_heads * p.num_lines * p.line_words;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(p.num_words, 1 << 16));
  ClassifyTiles<<<blocks, 32 * kWordTiles, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace jax_fmha::gpu
