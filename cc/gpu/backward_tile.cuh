// What one tile of keys has to do in the backward: which queries see it, and which of them see all
// of it.
//
// Everything here looks at the problem from the side of the keys. The segment plan is that of the
// problem with queries and keys swapped: `plan.rows` holds the interval of queries of each key.
#pragma once

#include "cc/gpu/problem_params.cuh"

namespace jax_fmha::gpu {

// How tiles of (keys, kv head, batch entry) are numbered. Sections of (batch entry, kv head) pairs,
// whose queries fit in L2, come one after the other; inside one, key tiles go first to last, so
// that causal ones with most queries start early.
struct KeyTileOrder {
  int num_kv_tiles, num_tiles, pairs_per_section;
};

struct BackwardTileInfo {
  int is_last;  // no tile: the block is done
  int batch, kv_head, kv_first;
  int q_begin, q_end;                // query tiles, of every query head of the group
  int full_begin, full_end;          // queries that see every key of the tile
  int is_elementwise, is_scattered;  // partial by more than intervals
  int may_leak;                      // queries of several segments share query tiles
  EntryLimits limits;
};

// Query tiles that may attend to the tile of keys from kv_first on, first and one past the last.
__device__ __forceinline__ int2 QueryTiles(const ScoreParams& s, const SegmentPlan& kv_plan,
                                           const EntryLimits& e, int batch, int kv_first,
                                           int block_q, int block_kv) {
  const int kv_end = min(kv_first + block_kv, e.kv_length);
  if (kv_end <= kv_first) return make_int2(0, 0);
  int q_lo = max(0, kv_first - e.hi_shift + 1), q_hi = min(e.q_length, kv_end - e.lo_shift);
  if (kv_plan.blocks != nullptr) {
    const int num_blocks = (s.seqlen_kv + kPlanRows - 1) / kPlanRows;
    const PlanBlock* blocks = kv_plan.blocks + static_cast<int64_t>(batch) * num_blocks;
    int lo_min = kFar, hi_max = 0;
    for (int i = kv_first / kPlanRows; i <= (kv_end - 1) / kPlanRows; ++i) {
      lo_min = min(lo_min, blocks[i].lo_min);
      hi_max = max(hi_max, blocks[i].hi_max);
    }
    q_lo = max(q_lo, lo_min);
    q_hi = min(q_hi, hi_max);
  }
  if (q_hi <= q_lo) return make_int2(0, 0);
  return make_int2(q_lo / block_q, (q_hi + block_q - 1) / block_q);
}

template <int kBlockQ, int kBlockKv, bool kHasElements>
__device__ __forceinline__ BackwardTileInfo DescribeBackwardTile(const ScoreParams& s,
                                                                 const SegmentPlan& plan,
                                                                 const KeyTileOrder& order,
                                                                 int tile) {
  static_assert(kBlockKv % kPlanRows == 0);
  BackwardTileInfo info;
  info.is_last = 0;
  const int pairs = s.batch * s.num_kv_heads;
  const int per_section = order.pairs_per_section * order.num_kv_tiles;
  const int section = tile / per_section;
  const int within = tile - section * per_section;
  const int pairs_here = min(order.pairs_per_section, pairs - section * order.pairs_per_section);
  const int kv_tile = within / pairs_here;
  const int pair = section * order.pairs_per_section + within - kv_tile * pairs_here;
  info.batch = pair / s.num_kv_heads;
  info.kv_head = pair - info.batch * s.num_kv_heads;
  info.kv_first = kv_tile * kBlockKv;
  info.limits = LimitsOf(s, info.batch);
  const EntryLimits& e = info.limits;
  // Query i sees key j where lo_shift <= j - i < hi_shift.
  const int kv_end = min(info.kv_first + kBlockKv, e.kv_length);
  const int kv_last = info.kv_first + kBlockKv - 1;
  int lo_min = max(0, info.kv_first - e.hi_shift + 1),
      hi_max = min(e.q_length, kv_end - e.lo_shift);
  int lo_max = max(0, kv_last - e.hi_shift + 1),
      hi_min = min(e.q_length, info.kv_first - e.lo_shift + 1);
  info.is_scattered = info.may_leak = 0;
  if (plan.blocks != nullptr && kv_end > info.kv_first) {
    const int num_blocks = (s.seqlen_kv + kPlanRows - 1) / kPlanRows;
    const PlanBlock* blocks = plan.blocks + static_cast<int64_t>(info.batch) * num_blocks;
    PlanBlock sum = blocks[info.kv_first / kPlanRows];
    for (int i = info.kv_first / kPlanRows + 1; i <= (kv_end - 1) / kPlanRows; ++i) {
      const PlanBlock x = blocks[i];
      sum.lo_min = min(sum.lo_min, x.lo_min);
      sum.hi_max = max(sum.hi_max, x.hi_max);
      sum.lo_max = max(sum.lo_max, x.lo_max);
      sum.hi_min = min(sum.hi_min, x.hi_min);
      sum.is_scattered |= x.is_scattered;
    }
    lo_min = max(lo_min, sum.lo_min);
    hi_max = min(hi_max, sum.hi_max);
    lo_max = max(lo_max, sum.lo_max);
    hi_min = min(hi_min, sum.hi_min);
    info.is_scattered = sum.is_scattered;
    // A query may share a tile with queries of another segment even where all keys have one.
    info.may_leak = 1;
  }
  info.is_elementwise = info.is_scattered;
  if constexpr (kHasElements) {
    info.is_elementwise |= s.q_positions.data != nullptr || s.kv_positions.data != nullptr ||
                           (s.mask.data != nullptr && s.mask_plan.words == nullptr);
  }
  // No tile with keys beyond the last is full: their gradients are 0 by selection.
  info.full_begin = lo_max;
  info.full_end = info.is_elementwise || kv_last >= e.kv_length ? 0 : hi_min;
  if (kv_end <= info.kv_first) hi_max = lo_min;
  info.q_begin = lo_min / kBlockQ;
  info.q_end = hi_max > lo_min ? (hi_max + kBlockQ - 1) / kBlockQ : info.q_begin;
  return info;
}

// Interval of queries that may see key j, whose segment has those of `run`; empty intervals are
// (0, 0).
__device__ __forceinline__ int2 KeyInterval(const EntryLimits& e, int2 run, int j) {
  const int lo = max(max(0, run.x), j - e.hi_shift + 1);
  const int hi = min(min(e.q_length, run.y), j - e.lo_shift + 1);
  return j >= e.kv_length || lo >= hi ? make_int2(0, 0) : make_int2(lo, hi);
}

__device__ __forceinline__ int2 KeyInterval(const ScoreParams& s, const SegmentPlan& plan,
                                            const EntryLimits& e, int b, int j) {
  const bool has_run = plan.rows != nullptr && j < s.seqlen_kv;
  return KeyInterval(e, has_run ? plan.rows[b * PlanStride(s.seqlen_kv) + j] : make_int2(0, kFar),
                     j);
}

// The first key tile whose queries reach into query tile m. Without segments these ranges only move
// forward with the keys, so that all tiles between it and one that sees m see m, too.
template <int kBlockQ, int kBlockKv>
__device__ __forceinline__ int FirstKeyTile(const EntryLimits& e, int m) {
  // Tile t ends with query min(q_length, end(t) - lo_shift), which must lie beyond m's first.
  const int past = m * kBlockQ + e.lo_shift;  // end(t) > past
  return past < 0 ? 0 : past / kBlockKv;
}

}  // namespace jax_fmha::gpu
