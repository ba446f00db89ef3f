// Sizes of what the device works out before a main kernel. Plain C++, for workspace sizes.
#pragma once

#include <cstdint>
#include <utility>

#include "cc/core/problem.h"

namespace jax_fmha::gpu {

// How many heads make a section: at most `most` (or one), and about as many in each, since a short
// last section would leave too few tiles for all multiprocessors.
constexpr int64_t EvenSections(int64_t heads, int64_t most) {
  return CeilDiv(heads, CeilDiv(heads, most < 1 ? 1 : most));
}

// Longer sequences are refused, so that a position plus a clamped offset fits an int.
inline constexpr int kMaxSeqlen = 1 << 29;
inline constexpr int kFar = 1 << 30;

inline constexpr int kRunChunk = 1024;  // keys per block of the run kernels
inline constexpr int kPlanRows = 64;    // query rows that one PlanBlock summarises
inline constexpr int kStripRows = 16;   // query rows that are repaired together

// Key intervals of the queries of one block of kPlanRows rows.
struct PlanBlock {
  int lo_min, hi_max;  // union of the rows' intervals
  int lo_max, hi_min;  // what all rows share
  int is_scattered;  // some row's segment occupies several key runs: compare ids element by element
};

// What a mask says of 32 tiles of the main kernel that follow each other, one bit each: whether it
// keeps some pair, and whether it drops some.
struct TileWord {
  uint32_t seen, partial;
};
inline constexpr int kWordTiles = 32;

// Words of `lines` lines of `tiles` tiles each, for a mask with every batch entry and head of its
// own: two bits per tile, not per pair.
inline int64_t MaskPlanBytes(const Problem& p, int64_t lines, int64_t tiles) {
  if (!p.has_mask && !p.has_tile_mask) return 0;
  return RoundUp(
      p.batch * p.num_q_heads * lines * CeilDiv(tiles, kWordTiles) * int64_t{sizeof(TileWord)}, 16);
}

struct Strip {
  int batch, head, row;
};

// The same problem with queries and keys swapped, as the plan of the keys sees it.
inline Problem Swapped(Problem p) {
  std::swap(p.seqlen_q, p.seqlen_kv);
  std::swap(p.num_q_heads, p.num_kv_heads);
  return p;
}

// Elements of dbias, 0 if it is not wanted.
inline int64_t BiasGradientSize(const Problem& p) {
  if (!p.wants_dbias) return 0;
  int64_t size = 1;
  for (int64_t x : p.dbias_shape) size *= x;
  return size;
}

// Its sums, where they cannot lie in the result.
inline int64_t BiasSumBytes(const Problem& p) {
  return p.bias_dtype == DType::kF32 ? 0 : BiasGradientSize(p) * int64_t{sizeof(float)};
}

inline int64_t TurnTakerBytes(const Problem& p, int64_t kv_tiles) { return p.batch * kv_tiles * 8; }
inline int64_t FirstTakerBytes(const Problem& p, int64_t q_tiles) { return p.batch * q_tiles * 4; }

// Rows of a batch entry in a plan lie this far apart, so that whole tiles of them can be copied.
constexpr int64_t PlanStride(int64_t seqlen) { return RoundUp(seqlen, 128); }

inline int64_t SegmentPlanBytes(const Problem& p) {
  const int64_t chunks = CeilDiv(p.seqlen_kv, kRunChunk), blocks = CeilDiv(p.seqlen_q, kPlanRows);
  return p.batch * (RoundUp(8 * p.seqlen_kv, 16) + 8 * PlanStride(p.seqlen_q)) +
         RoundUp(p.batch * 4 * (p.seqlen_kv + 1), 16) + 2 * RoundUp(p.batch * 4 * chunks, 16) +
         RoundUp(p.batch * blocks * int64_t{sizeof(PlanBlock)}, 16);
}

inline int64_t RepairListBytes(const Problem& p) {
  return RoundUp(CeilDiv(p.seqlen_q, kStripRows) * p.batch * p.num_q_heads * int64_t{sizeof(Strip)},
                 16);
}

inline constexpr int64_t kForwardCounterBytes = 16;

// Counters, with segments the list of strips and their plan, with a mask its plan by tile. A strip
// may be reported by each of the blocks that share out its columns.
inline int64_t ForwardWorkspaceBytes(const Problem& p, int block_q, int block_kv,
                                     int value_parts = 1) {
  const int64_t segments =
      p.has_segment_ids ? value_parts * RepairListBytes(p) + SegmentPlanBytes(p) : 0;
  return kForwardCounterBytes + segments +
         MaskPlanBytes(p, CeilDiv(p.seqlen_q, block_q), CeilDiv(p.seqlen_kv, block_kv));
}

}  // namespace jax_fmha::gpu
